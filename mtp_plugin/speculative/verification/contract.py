"""What a verification mode is, and what it reads of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from mtp_plugin.kernels.backend import Backend
from mtp_plugin.requests.columns import Number, SlotColumn
from mtp_plugin.speculative.host import DecodingOptions, HostStep, RequestFacts
from mtp_plugin.speculative.metrics.acceptance import Label
from mtp_plugin.speculative.ops.acceptance import AcceptanceRules
from mtp_plugin.speculative.step import StepLayout
from mtp_plugin.speculative.verification.draft_rules import (
    COUPLED_DRAFTS,
    GREEDY_DRAFTS,
    DraftRule,
)


@dataclass(frozen=True)
class VerificationInputs:
    """What modes read of a step."""

    step: HostStep
    logits: torch.Tensor  # [C + G*(K+1), V] of the target, edited as the requests ask
    input_ids: torch.Tensor | None  # [T]; None: the caller has none

    @property
    def layout(self) -> StepLayout:
        """The step's shape."""
        return self.step.layout


class VerificationMode(ABC):
    """One way to judge drafts: one file, its config keys, and a line in the registry.

    Args:
        options: of the config. device: that steps run on.

    Raises:
        ConfigError: options that cannot be.
    """

    name: ClassVar[str]
    verification: ClassVar[str | None] = None
    """Value of ``mtp.verification`` that asks for it; None: another option does."""
    draft_rule: DraftRule = COUPLED_DRAFTS
    """How drafts are drawn for this mode, and what is kept of them."""
    columns: Sequence[SlotColumn] = ()
    """What it keeps per slot, behind what every slot has."""
    served_options: ClassVar[frozenset[str]] = frozenset()
    """Options of a request that it gives."""
    refused_options: ClassVar[frozenset[str]] = frozenset()
    """Options that are given without it, and not beside it."""

    def __init__(self, options: DecodingOptions, device: torch.device) -> None:  # noqa: ARG002 - modes may
        if options.mtp.draft_sampling == "greedy":
            self.draft_rule = GREEDY_DRAFTS

    def move(self, to: Callable[[torch.Tensor], torch.Tensor]) -> None:  # noqa: B027 - as above
        """Replace the mode's own tensors, as ``nn.Module.to`` does those of a module."""

    @classmethod
    def is_enabled(cls, options: DecodingOptions) -> bool:
        """Whether a config asks for this mode."""
        return options.mtp.verification == cls.verification

    @classmethod  # noqa: B027 - most have nothing to check
    def check(cls, options: DecodingOptions) -> None:
        """Check the mode's options before anything is built.

        Raises:
            ConfigError: naming the option.
        """

    @classmethod
    def label(cls, options: DecodingOptions) -> Label | None:  # noqa: ARG003
        """What reports say of texts and figures; None: the text is the target's own."""
        return None

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
