"""What a verification mode is, and what it reads of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative.host import read_final_context
from mtp_plugin.speculative.metrics.acceptance import Label
from mtp_plugin.speculative.ops.acceptance import AcceptanceRules, Verdict
from mtp_plugin.speculative.step import RowParameters, StepLayout
from mtp_plugin.speculative.verification.draft_rules import GREEDY_DRAFTS, DraftRule


@dataclass(frozen=True)
class ModeOptions:
    """What modes are built from."""

    config: Any
    """``MTPDecodingConfig``, or a host's object with the same fields."""
    max_draft_len: int
    """K: the most that a step may have."""
    device: torch.device
    """That steps run on."""
    thinking_tokens: tuple[int, int] | None = None
    """(begin, end) ids that a host hands in; None: those of the config."""


@dataclass(frozen=True)
class SlotColumn:
    """A value, or a row of values, that a mode keeps per slot; a pool of the manager."""

    name: str
    dtype: torch.dtype
    empty: float  # of a slot that no request has
    width: int | None = None  # values per slot; None: one, in a pool [S]


@dataclass(frozen=True)
class VerificationInputs:
    """What modes read of a step beside its layout."""

    logits: torch.Tensor  # [C + G*(K+1), V] of the target, early stops masked
    draft_tokens: torch.Tensor  # [G*K] integer
    input_ids: torch.Tensor | None  # [T]; None: the caller has none
    draft_lens: torch.Tensor | None  # [G]; None: K everywhere
    final_context: torch.Tensor | None  # [C] bool: the chunk ends its prompt; None: all do
    scans_prompts: bool
    """The host tells nothing of prompts beyond a chunk, so their text is read here."""
    parameters: RowParameters | None  # per request; None: the host has none
    spec_metadata: Any  # of the host, for modes that keep state per slot

    @classmethod
    def read(
        cls,
        layout: StepLayout,
        logits: torch.Tensor,
        input_ids: torch.Tensor | None,
        spec_metadata: Any,
    ) -> VerificationInputs:
        """Read a host's speculative metadata.

        Args:
            logits: [C + G*(K+1), V]. input_ids: [T].
        """
        drafts = spec_metadata.draft_tokens
        if drafts is None:
            drafts = torch.empty(0, dtype=torch.int32, device=logits.device)
        draft_lens = getattr(spec_metadata, "draft_lens", None)
        next_prompt = getattr(spec_metadata, "next_prompt_tokens", None)
        return cls(
            logits=logits,
            draft_tokens=drafts.reshape(-1)[: layout.num_generations * layout.draft_len],
            input_ids=input_ids,
            draft_lens=None if draft_lens is None else draft_lens[: layout.num_generations],
            final_context=read_final_context(spec_metadata, layout),
            scans_prompts=next_prompt is None,
            parameters=getattr(spec_metadata, "row_parameters", None),
            spec_metadata=spec_metadata,
        )


def verification_of(config: Any) -> str:
    """``mtp.verification`` of a config; of one that has no such option, the default."""
    return str(getattr(getattr(config, "mtp", None), "verification", "coupled"))


class VerificationMode(ABC):
    """One way to judge drafts: one file, its config keys, and a line in the registry.

    Raises:
        ConfigError: options that cannot be.
    """

    name: ClassVar[str]
    verification: ClassVar[str | None] = None
    """Value of ``mtp.verification`` that asks for it; None: another option does."""
    draft_rule: DraftRule = GREEDY_DRAFTS
    """How drafts are drawn for this mode, and what is kept of them."""
    columns: Sequence[SlotColumn] = ()
    """What it keeps per slot."""

    def __init__(self, options: ModeOptions) -> None:  # noqa: B027 - most keep nothing
        """Nothing that all modes keep."""

    def move(self, to: Callable[[torch.Tensor], torch.Tensor]) -> None:  # noqa: B027 - as above
        """Replace the mode's own tensors, as ``nn.Module.to`` does those of a module."""

    @classmethod
    def is_enabled(cls, config: Any) -> bool:
        """Whether a config asks for this mode."""
        return verification_of(config) == cls.verification

    @classmethod  # noqa: B027 - most have nothing to check
    def check(cls, config: Any, max_draft_len: int) -> None:
        """Check the mode's options before anything is built.

        Raises:
            ConfigError: naming the option.
        """

    @classmethod
    def label(cls, config: Any, max_draft_len: int) -> Label | None:  # noqa: ARG003
        """What reports say of texts and figures; None: the text is the target's own."""
        return None

    @abstractmethod
    def verify(
        self,
        layout: StepLayout,
        inputs: VerificationInputs,
        rules: AcceptanceRules,
        *,
        backend: Backend,
    ) -> AcceptanceRules:
        """``rules``, and how this mode judges the rows that are its own."""

    def settle(  # noqa: B027 - most keep nothing
        self,
        layout: StepLayout,
        inputs: VerificationInputs,
        rules: AcceptanceRules,
        verdict: Verdict,
    ) -> None:
        """Move the mode's columns on by what a step emitted under ``rules``."""

    def slot_values(self, request: Any) -> Mapping[str, float | Sequence[float]]:  # noqa: ARG002
        """The columns of a request that gets a slot, by name; what is left out is empty."""
        return {}
