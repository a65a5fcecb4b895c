"""Options of an engine with rows, and what its requests and ops need to know about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Literal

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypeVar

from mtp_plugin.config.values import RelaxedTopK

_ROWS = 64
"""A draft head has a multiple of so many rows: others make its product slow."""


class RowOptions(BaseModel):
    """Options of one engine."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    verification: str = Field(
        default="coupled",
        description="verification method of requests that name none: coupled (drafts and target "
        "tokens are sampled with the same noise, so that a seed gives the same output with any "
        "number of drafts), rejection, block, or a registered method",
    )
    thinking_begin_token: int | None = Field(
        default=None, ge=0, description="token id that begins the thinking phase"
    )
    thinking_end_token: int | None = Field(
        default=None,
        ge=0,
        description="token id that ends it; both given: relaxed acceptance is available",
    )
    relaxed_topk: RelaxedTopK = Field(
        default=1,
        description="in the thinking phase of a greedy request, a draft among this many most "
        "probable tokens is accepted; 1: strict",
    )
    relaxed_delta: float = Field(
        default=0.0,
        ge=0,
        description="if its probability is at most this much below the highest one",
    )
    kernels: Literal["auto", "triton", "reference"] = Field(
        default="auto", description="auto: Triton kernels on CUDA devices, else torch"
    )
    logger: ClassVar[str] = "mtp_plugin"
    """An engine may show those of its own alone."""
    option_prefix: ClassVar[str] = ""
    """How messages write an option of the engine, without its name."""
    draft_len_option: ClassVar[str] = "num_speculative_tokens"
    """How messages write K."""
    synthetic_option: ClassVar[str] = "synthetic acceptance"

    @property
    def summary(self) -> dict[str, str]:
        """What the log and the metrics say of them."""
        return {"verification": self.verification}

    @property
    def is_relaxed(self) -> bool:
        """Whether relaxed acceptance is available."""
        return self.thinking_begin_token is not None and self.thinking_end_token is not None

    def no_draft_probs(self, drafter: str) -> str:
        """Return why a method that reads the probabilities of drafts cannot be used."""
        return f"needs the probabilities of drafts, which {drafter} does not keep: use coupled"


Options = TypeVar("Options", bound=RowOptions, default=RowOptions, covariant=True)


@dataclass(frozen=True)
class EngineSettings(Generic[Options]):
    """What requests and ops need to know about an engine with the plugin."""

    options: Options
    num_drafts: int  # K, 0 without speculative decoding
    keeps_draft_probs: bool = False
    """``rejection`` and ``block`` need them."""
    synthetic_rates: tuple[float, ...] | None = None
    """Share of steps that accept at least i+1 drafts; None: real acceptance."""
    draft_ids: Sequence[int] | None = None
    """Token ids that may be drafted, ascending; a range: the lowest ones; None: all."""
    num_added_ids: int = 0
    """Of ``draft_ids``: stop ids and thinking tags that the option leaves out."""
    num_ranks: int = 1
    """Of tensor parallelism, over which the rows of the LM head are split."""
    drafter: str = "mtp"
    """How the engine names it."""

    @property
    def summary(self) -> dict[str, str]:
        """What the log and the metrics say of an engine."""
        return {
            **self.options.summary,
            "drafts": str(self.num_drafts),
            "drafter": self.drafter if self.num_drafts else "none",
        }

    @property
    def most_draft_columns(self) -> int:
        """Columns of draft logits with ``draft_ids``, those of padding included."""
        return rows_per_rank(len(self.draft_ids or ()), self.num_ranks) * self.num_ranks


def rows_per_rank(num_ids: int, num_ranks: int = 1) -> int:
    """Return how many rows of a draft head each rank has, those of padding included."""
    return -(-num_ids // (num_ranks * _ROWS)) * _ROWS
