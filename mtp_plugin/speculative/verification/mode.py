"""The base class of verification modes, and their inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from mtp_plugin.errors import MetadataError
from mtp_plugin.ops.acceptance import AcceptanceRules
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.step import Accepted, StepLayout
from mtp_plugin.requests.columns import Number, SlotColumn
from mtp_plugin.speculative.host import DecodingOptions, HostStep, RequestFacts
from mtp_plugin.speculative.metrics.acceptance import Label
from mtp_plugin.speculative.verification.draft_rules import (
    GREEDY_DRAFTS,
    SAMPLED_DRAFTS,
    DraftRule,
)


@dataclass(frozen=True)
class VerificationInputs:
    """Inputs of the modes in one step."""

    step: HostStep
    logits: torch.Tensor  # [C + G*(K+1), V] of the target, masked
    input_ids: torch.Tensor | None  # [T]; None: not given
    rows: LogitRows | None = None  # of the target; None: all requests are greedy
    truncation: torch.Tensor | None = None
    """[N, TRUNCATION_SIZE] float32, as `sample_tokens` wrote it; None: no mode reads it."""

    @property
    def layout(self) -> StepLayout:
        return self.step.layout

    def expect_rows(self) -> LogitRows:
        """Return the rows of the target.

        Raises:
            MetadataError: all requests of the step are greedy.
        """
        if self.rows is None:
            raise MetadataError("verification: expected rows of a step that samples, got None")
        return self.rows


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
    reads_truncation: ClassVar[bool] = False
    """Whether it reads ``truncation`` of `VerificationInputs`."""
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
    def count_draft_probs(cls, options: DecodingOptions) -> int:  # noqa: ARG003
        """Return for how many drafts per slot the mode reads ``draft_probs`` of the manager."""
        return 0

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
        """Return `rules` extended with this mode's decisions for the rows it owns."""

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
