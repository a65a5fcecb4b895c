"""The base class of verification modes, and their inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from typing_extensions import Self

from mtp_plugin.errors import MetadataError
from mtp_plugin.ops.acceptance import AcceptanceRules
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.step import Accepted, SamplingKind, SlotRows, StepLayout
from mtp_plugin.requests.columns import Number, SlotColumn
from mtp_plugin.speculative.host import DecodingOptions, RequestFacts
from mtp_plugin.speculative.metrics.acceptance import Label
from mtp_plugin.speculative.verification.draft_rules import (
    GREEDY_DRAFTS,
    SAMPLED_DRAFTS,
    DraftRule,
)
from mtp_plugin.verifications import codes, drafts_of

DELTA_POOL = "mtp_relaxed_delta_pool"
"""Slot column and attribute of the manager: the delta of relaxed acceptance that applies."""


@dataclass(frozen=True)
class VerificationInputs:
    """The rows of logits that a step verifies, and what verification reads of their requests.

    Without ``first_rows`` rows are those of the layout: one of each context, then K+1 of each
    generation. With it they are ragged: a generation has as many rows as drafts and one more,
    anywhere in ``logits``. Modes that read rows get them expanded to K+1.
    """

    layout: StepLayout
    logits: torch.Tensor  # [rows, V] of the target, masked
    draft_tokens: torch.Tensor  # [G*K] or [G, K] integer; outside the vocabulary: absent
    draft_lens: torch.Tensor | None = None  # [G] integer: number of drafts; None: K
    slots: SlotRows | None = None  # of the requests; None: unknown, all requests are greedy
    missing_slots: str | None = None  # why there are no slots, if there should be
    sampling_kind: SamplingKind = SamplingKind.GREEDY
    methods: frozenset[str] | None = None
    """Verification methods of the step's requests; None: any. Others do not run."""
    final_context: torch.Tensor | None = None  # [C] bool: ends its prompt; None: all do
    draft_probs: torch.Tensor | None = None  # [S, K, V] float32, see `ProposedDrafts`
    delta_in_force: torch.Tensor | None = None  # [S] float32, see `RelaxedRule`
    checked: bool = False  # a step of the same shapes, dtypes and layouts has passed all checks
    prompt_ids: torch.Tensor | None = None
    """[>= rows of prompts] integer: prompt chunks that may begin or end a thinking phase; None:
    slots have the phase after the prompts."""
    rows: LogitRows | None = None  # of ``logits``; None: all requests are greedy
    row_slots: SlotRows | None = None
    """Slots of the requests of ``rows``, if these are one row per request; None: ``slots``."""
    first_rows: torch.Tensor | None = None  # [R] integer: row with which each request begins
    full_rows: torch.Tensor | None = None
    """[R*(K+1)] integer, with ``first_rows``: the rows of every request; where it has fewer, any
    other rows."""
    truncation: torch.Tensor | None = None
    """[rows, TRUNCATION_SIZE] float32, as `sample_tokens` wrote it; None: no mode reads it."""

    def expect_rows(self) -> LogitRows:
        """Return the rows of the target.

        Raises:
            MetadataError: all requests of the step are greedy.
        """
        if self.rows is None:
            raise MetadataError("verification: expected rows of a step that samples, got None")
        return self.rows

    def expect_slots(self) -> SlotRows:
        """Return the slots of the requests.

        Raises:
            MetadataError: there are none.
        """
        if self.slots is None:
            raise MetadataError(
                self.missing_slots
                or "verification: expected the slots of the requests, got None; the step needs "
                "spec_metadata.mtp_hidden_states_manager with slot_rows()"
            )
        return self.slots

    def first_positions(self) -> torch.Tensor:
        """Return the position of each request's first row [R] integer.

        Raises:
            TensorContractError: the step has no positions.
        """
        if self.row_slots is None:
            return self.layout.first_logit_positions("verification")
        positions: torch.Tensor = self.expect_rows().positions
        if self.first_rows is None:
            return positions[:: self.layout.step_rows]
        return positions[self.first_rows.to(torch.int64)]

    def drafts(self) -> torch.Tensor:
        """Return the drafts of the generations [G, K]; -1: absent."""
        drafts = self.draft_tokens.reshape(self.layout.num_generations, self.layout.draft_len)
        if self.draft_lens is None:
            return drafts
        columns = torch.arange(self.layout.draft_len, device=drafts.device)
        return torch.where(columns < self.draft_lens.unsqueeze(1), drafts, -1)

    def of_generations(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows [C + G*(K+1), ...] of the generations as [G, K+1, ...]."""
        shape = (self.layout.num_generations, self.layout.step_rows)
        generations: torch.Tensor = rows[self.layout.num_contexts :].unflatten(0, shape)
        return generations

    def target_tokens(self, rules: AcceptanceRules) -> torch.Tensor:
        """Return the target tokens of the generations [G, K+1] int32; -1: no finite logit.

        They are the sampled tokens, or in a greedy step the argmax of each row.
        """
        if rules.choices is not None:
            return self.of_generations(rules.choices)
        return argmax_tokens(self.of_generations(self.logits))

    def expand(self, rules: AcceptanceRules) -> tuple[Self, AcceptanceRules]:
        """Return these inputs and rules with K+1 rows of every generation."""
        if self.row_slots is None:
            return self, rules
        rows = replace(
            self.expect_rows(), width=self.layout.step_rows, positions=self.first_positions()
        )
        drafts, full = self.draft_tokens.contiguous(), self.full_rows
        inputs = replace(self, rows=rows, draft_tokens=drafts, row_slots=None)
        if full is None:
            return inputs, rules
        inputs = replace(
            inputs,
            logits=self.logits[full],
            truncation=None if self.truncation is None else self.truncation[full],
            first_rows=None,
            full_rows=None,
        )
        choices = None if rules.choices is None else rules.choices[full]
        return inputs, replace(rules, choices=choices)


def argmax_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Return the argmax of rows [..., V] int32; -1: no finite logit."""
    best, tokens = logits.masked_fill(logits.isnan(), -torch.inf).max(dim=-1)
    return torch.where(best > -torch.inf, tokens, -1).to(torch.int32)


class VerificationMode(ABC):
    """Base class of verification modes.

    A mode is enabled by its name in ``mtp_plugin.verifications`` or by other config keys; it is
    listed in `registry`.

    Args:
        options: of the config. device: on which steps run.

    Raises:
        ConfigError: invalid options.
    """

    name: ClassVar[str]
    verifications: ClassVar[tuple[str, ...]] = ()
    """Methods of ``mtp_plugin.verifications`` that it implements; empty: other keys enable it."""
    draft_rule: DraftRule = SAMPLED_DRAFTS
    """How drafts are chosen for this mode; equal for all modes of a worker."""
    reads_rows: ClassVar[bool] = True
    """Whether it reads ``logits``, target tokens or ``rows``, and so needs K+1 rows of every
    generation."""
    reads_truncation: ClassVar[bool] = False
    """Whether it reads ``truncation`` of `VerificationInputs`."""
    reads_method: ClassVar[bool] = False
    """Whether :meth:`verify` leaves requests with other methods alone; False: the verifier drops
    what it decides about them."""
    num_draft_probs: int = 0
    """See :meth:`count_draft_probs`."""
    columns: Sequence[SlotColumn] = ()
    """Slot columns of this mode, in addition to those that every slot has."""
    reads_tokens: ClassVar[bool] = True
    """Whether :meth:`slot_values` reads ``tokens``; False: it gets none."""
    served_options: ClassVar[frozenset[str]] = frozenset()
    """Request options that this mode serves."""
    refused_options: ClassVar[frozenset[str]] = frozenset()
    """Request options that cannot be served while this mode is enabled."""

    def __init__(self, options: DecodingOptions, device: torch.device) -> None:  # noqa: ARG002 - modes may
        if options.mtp.draft_sampling == "greedy":
            self.draft_rule = GREEDY_DRAFTS
        self.num_draft_probs = self.count_draft_probs(options)

    @cached_property
    def methods(self) -> frozenset[str]:
        """Names of the verification methods by which requests select it; empty: it always runs."""
        return frozenset(self.verifications) & codes().keys()

    def move(self, to: Callable[[torch.Tensor], torch.Tensor]) -> None:  # noqa: B027 - as above
        """Apply ``to`` to the mode's own tensors, as ``nn.Module._apply`` does."""

    @classmethod
    def is_enabled(cls, options: DecodingOptions) -> bool:
        return not set(options.mtp.verifications).isdisjoint(cls.verifications)

    @classmethod  # noqa: B027 - most have nothing to check
    def check(cls, options: DecodingOptions) -> None:
        """Check the mode's options before components are built.

        Raises:
            ConfigError: an invalid option, by name.
        """

    @classmethod
    def count_draft_probs(cls, options: DecodingOptions) -> int:
        """Return for how many drafts per slot the mode reads ``draft_probs`` of the manager: of
        methods that verify independently sampled drafts, for all."""
        methods = set(cls.verifications).intersection(options.mtp.verifications)
        is_plain = any("plain" in drafts_of(name) for name in methods)
        return options.max_draft_len if is_plain and options.mtp.draft_sampling != "greedy" else 0

    @classmethod
    def label(cls, options: DecodingOptions) -> Label | None:  # noqa: ARG003
        """Return the label for outputs and acceptance rates in reports; None: lossless."""
        return None

    @classmethod
    def changes_text(cls, options: DecodingOptions, requested: Mapping[str, Any]) -> bool:  # noqa: ARG003
        """Return whether drafts may change the output of a request with these options.

        Called only if the mode has a :meth:`label`.
        """
        return True

    def changes_output(self, options: DecodingOptions, requested: Mapping[str, Any]) -> bool:
        """As :meth:`changes_text`, with the methods that this mode was created with."""
        return self.label(options) is not None and self.changes_text(options, requested)

    def refusals(self, requested: Mapping[str, Any]) -> Iterable[str]:  # noqa: ARG002
        """Return why a request with these options cannot be served."""
        return ()

    @abstractmethod
    def verify(
        self, inputs: VerificationInputs, rules: AcceptanceRules, *, backend: Backend
    ) -> AcceptanceRules:
        """Return `rules` extended with this mode's decisions.

        They are ``choices`` and ``forced_matches``; those for requests that select another
        verification method are dropped, unless `reads_method`.
        """

    def mark_failed(self, inputs: VerificationInputs, accepted: Accepted) -> None:  # noqa: B027
        """Set ``accepted.status`` of the requests that :meth:`verify` could not decide about to
        the code of their method; they end with its error."""

    def slot_values(self, facts: RequestFacts, tokens: Sequence[int]) -> Mapping[str, Number]:  # noqa: ARG002
        """Return the mode's columns of a request that gets a slot, by name; missing ones have
        their default.

        Args:
            tokens: prompt and the output so far, which a preempted request has.
        """
        return {}
