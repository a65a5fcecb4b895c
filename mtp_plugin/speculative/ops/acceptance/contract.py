"""What acceptance takes and gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_plugin.speculative.step import Accepted


@dataclass(frozen=True)
class RelaxedRule:
    """Per-request state and parameters of relaxed acceptance, one row per request of the batch."""

    thinking: torch.Tensor  # [R] bool: in the thinking phase before this step
    topk: torch.Tensor  # [R] int32, >= 1
    delta: torch.Tensor  # [R] float32, >= 0: allowed distance to the highest probability
    stop_ids: torch.Tensor | None  # [>= R, P] int32, padded with -1: accepted only as top-1
    begin_token: int  # -1 where the vocabulary has none
    end_token: int


@dataclass(frozen=True)
class AcceptanceRules:
    """How the rows of a batch are judged; rows that no rule names are judged strictly."""

    relaxed: RelaxedRule | None = None  # decides where a request thinks
    forced_matches: torch.Tensor | None = None
    """[G] integer: so many leading drafts stand, and no other rule decides; negative: the target
    decides."""


STRICT = AcceptanceRules()


@dataclass(frozen=True)
class Verdict:
    """What became of a step's drafts."""

    accepted: Accepted
    thinking: torch.Tensor | None
    """[R] bool, the phase after this step's emitted tokens; None without a relaxed rule."""
