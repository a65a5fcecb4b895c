"""What a verification mode is, and what it reads of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from mtp_plugin.errors import MetadataError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.requests.columns import Number, SlotColumn
from mtp_plugin.speculative.host import DecodingOptions, HostStep, RequestFacts
from mtp_plugin.speculative.logit_rows import LogitRows
from mtp_plugin.speculative.metrics.acceptance import Label
from mtp_plugin.speculative.ops.acceptance import AcceptanceRules
from mtp_plugin.speculative.step import StepLayout
from mtp_plugin.speculative.verification.draft_rules import (
    GREEDY_DRAFTS,
    SAMPLED_DRAFTS,
    DraftRule,
)


@dataclass(frozen=True)
class VerificationInputs:
    """What modes read of a step."""

    step: HostStep
    logits: torch.Tensor  # [C + G*(K+1), V] of the target, edited as the requests ask
    input_ids: torch.Tensor | None  # [T]; None: the caller has none
    rows: LogitRows | None = None  # of the target; None: nothing is drawn
    truncation: torch.Tensor | None = None
    """[N, TRUNCATION_SIZE], as `sample_tokens` wrote it; None: no mode reads it."""

    @property
    def layout(self) -> StepLayout:
        """The step's shape."""
        return self.step.layout

    def expect_rows(self) -> LogitRows:
        """The rows of the target, of a step in which tokens are drawn.

        Raises:
            MetadataError: they are not.
        """
        if self.rows is None:
            raise MetadataError("verification: expected the rows of a step that draws, got None")
        return self.rows


class VerificationMode(ABC):
    """One way to judge drafts: one file, a line in the registry, and the name that asks for it, or
    config keys.

    Args:
        options: of the config. device: that steps run on.

    Raises:
        ConfigError: options that cannot be.
    """

    name: ClassVar[str]
    verifications: ClassVar[tuple[str, ...]] = ()
    """Names in ``mtp_plugin.verifications`` that ask for it; none: another option does."""
    draft_rule: DraftRule = SAMPLED_DRAFTS
    """How drafts are drawn for this mode, and what is kept of them."""
    reads_truncation: ClassVar[bool] = False
    """Whether it asks what the draw left of the target's rows."""
    num_draft_probs: int = 0
    """See :meth:`count_draft_probs`."""
    columns: Sequence[SlotColumn] = ()
    """What it keeps per slot, behind what every slot has."""
    reads_tokens: ClassVar[bool] = True
    """Whether what it keeps depends on a request's tokens; False: it is given none."""
    served_options: ClassVar[frozenset[str]] = frozenset()
    """Options of a request that it gives."""
    refused_options: ClassVar[frozenset[str]] = frozenset()
    """Options that are given without it, and not beside it."""

    def __init__(self, options: DecodingOptions, device: torch.device) -> None:  # noqa: ARG002 - modes may
        if options.mtp.draft_sampling == "greedy":
            self.draft_rule = GREEDY_DRAFTS
        self.num_draft_probs = self.count_draft_probs(options)

    def move(self, to: Callable[[torch.Tensor], torch.Tensor]) -> None:  # noqa: B027 - as above
        """Replace the mode's own tensors, as ``nn.Module.to`` does those of a module."""

    @classmethod
    def is_enabled(cls, options: DecodingOptions) -> bool:
        """Whether a config asks for this mode."""
        return not set(options.mtp.verifications).isdisjoint(cls.verifications)

    @classmethod  # noqa: B027 - most have nothing to check
    def check(cls, options: DecodingOptions) -> None:
        """Check the mode's options before anything is built.

        Raises:
            ConfigError: naming the option.
        """

    @classmethod
    def count_draft_probs(cls, options: DecodingOptions) -> int:  # noqa: ARG003
        """Drafts per slot of which it reads what they were drawn from, in ``draft_probs`` of the
        manager."""
        return 0

    @classmethod
    def label(cls, options: DecodingOptions) -> Label | None:  # noqa: ARG003
        """What reports say of texts and figures; None: the text is the target's own."""
        return None

    @classmethod
    def changes_text(cls, options: DecodingOptions, asked: Mapping[str, Any]) -> bool:  # noqa: ARG003
        """Whether drafts may change the text of a request that asks for these options, by name;
        asked of modes whose :meth:`label` says how."""
        return True

    def refusals(self, asked: Mapping[str, Any]) -> Iterable[str]:  # noqa: ARG002
        """Why a request that asks for these options, by name, cannot be served here."""
        return ()

    @abstractmethod
    def verify(
        self, inputs: VerificationInputs, rules: AcceptanceRules, *, backend: Backend
    ) -> AcceptanceRules:
        """``rules``, and how this mode judges the rows that are its own."""

    def slot_values(self, facts: RequestFacts, tokens: Sequence[int]) -> Mapping[str, Number]:  # noqa: ARG002
        """The columns of a request that gets a slot, by name; what is left out is empty.

        Args:
            tokens: of the request, those emitted before a preemption too.
        """
        return {}
