"""The parallel mapping of a rank, and the row counts that ranks exchange in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import Self

from mtp_plugin.errors import MetadataError
from mtp_plugin.speculative.host.config import num_ranks


@dataclass(frozen=True)
class Ranks:
    """This rank within a host engine's parallel mapping."""

    tensor_parallel: int = 1  # ranks that split every layer, or the requests
    rank: int = 0  # index among them
    attention_dp: bool = False
    """The ranks split the requests: each has a full head, and layers exchange rows."""
    is_last_stage: bool = True
    """This rank has the last pipeline stage; other stages have no logits and no draft layers."""

    @classmethod
    def read(cls, mapping: Any) -> Self:
        """Read a host engine's mapping; None or a mapping of one rank is a single rank."""
        if mapping is None or num_ranks(mapping) in (None, 1):
            return cls()
        stages = int(getattr(mapping, "pp_size", None) or 1)
        return cls(
            tensor_parallel=int(getattr(mapping, "tp_size", None) or 1),
            rank=int(getattr(mapping, "tp_rank", None) or 0),
            attention_dp=bool(getattr(mapping, "enable_attention_dp", False)),
            is_last_stage=int(getattr(mapping, "pp_rank", stages - 1)) == stages - 1,
        )

    @property
    def splits_vocabulary(self) -> bool:
        """Whether a head returns only this rank's columns of the vocabulary."""
        return self.tensor_parallel > 1 and not self.attention_dp


def unserved_ranks(mapping: Any, *, gathers_logits: bool) -> str | None:
    """Return why a worker does not support a host engine's mapping; None if it does.

    Args:
        gathers_logits: the worker was given ``gather_logits``.
    """
    if mapping is None:
        return None
    count = num_ranks(mapping)
    if count == 1:
        return None
    if count is None:
        return "it has neither world_size nor parallel sizes"
    sizes = {
        name: int(getattr(mapping, name, None) or 1) for name in ("tp_size", "pp_size", "cp_size")
    }
    ranks = Ranks.read(mapping)
    if sizes["cp_size"] > 1:
        return f"context parallelism, cp_size={sizes['cp_size']}"
    if sizes["pp_size"] > 1 and ranks.is_last_stage:
        return f"the last of several pipeline stages, pp_size={sizes['pp_size']}"
    if sizes["pp_size"] == 1 and sizes["tp_size"] != count:
        return f"{count} ranks, but tp_size={sizes['tp_size']}"
    if ranks.attention_dp and getattr(mapping, "enable_lm_head_tp_in_adp", False):
        return (
            "a draft head split under attention data parallelism; write enable_lm_head_tp_in_adp: "
            "false, which changes no output"
        )
    if ranks.splits_vocabulary and not gathers_logits:
        return f"tensor parallelism, tp_size={sizes['tp_size']}, without gather_logits"
    return None


@dataclass(frozen=True)
class RankRows:
    """Number of query rows of each rank under attention data parallelism; None without it."""

    counts: Sequence[int] | None = None  # first draft pass
    later_counts: Sequence[int] | None = None  # draft passes with one row per request
    largest: int | None = None
    target_counts: Sequence[int] | None = None  # target pass
    generations: Sequence[int] | None = None  # requests with K+1 rows in the target pass

    @classmethod
    def read(cls, attn_metadata: Any, spec_metadata: Any) -> Self:
        """Read the counts that the host engine gathered for this step."""
        sequences = getattr(spec_metadata, "all_rank_num_seqs", None)
        later = getattr(spec_metadata, "subseq_all_rank_num_tokens", None)
        return cls(
            counts=getattr(spec_metadata, "all_rank_num_tokens", None),
            later_counts=sequences if later is None else later,
            largest=getattr(spec_metadata, "all_rank_max_num_tokens", None),
            target_counts=getattr(attn_metadata, "all_rank_num_tokens", None),
            generations=getattr(spec_metadata, "all_rank_num_gens", None),
        )

    def arguments(self, *, single_rows: bool) -> dict[str, Any]:
        """Return the keyword arguments of a draft layer."""
        counts, largest = self.counts, self.largest
        if single_rows:
            counts = self.later_counts
            largest = max(counts) if largest is not None and counts is not None else largest
        given = {"all_rank_num_tokens": counts, "all_rank_max_num_tokens": largest}
        return {name: value for name, value in given.items() if value is not None}

    def of_first_pass(self, ranks: Ranks, rows: int, further_rows: int) -> Self:
        """Return the row counts of the first draft pass of all ranks.

        Host engines count rows as their own workers need them: a generation has one row fewer than
        in the target pass if each draft token has its own layer.

        Args:
            rows: query rows of this rank.
            further_rows: query rows of a generation in addition to those of the target pass.

        Raises:
            MetadataError: the gathered counts do not give ``rows`` for this rank.
        """
        if self.counts is None:
            return self
        counts = self._counts(further_rows)
        if counts is None or len(counts) <= ranks.rank or counts[ranks.rank] != rows:
            raise MetadataError(
                f"all_rank_num_tokens: rank {ranks.rank} drafts with {rows} rows, which does not "
                f"follow from {list(self.counts)} of the speculative metadata and "
                f"{_format_counts(self.target_counts)} of the attention metadata"
            )
        largest = None if self.largest is None else max(counts)
        return replace(self, counts=counts, largest=largest)

    def _counts(self, further_rows: int) -> Sequence[int] | None:
        counts, target = self.counts, self.target_counts
        if counts is None or target is None:
            return counts
        generations = self.generations
        if generations is None:
            generations = [rows - fewer for rows, fewer in zip(target, counts, strict=False)]
        return [
            rows + further_rows * count for rows, count in zip(target, generations, strict=False)
        ]


def _format_counts(counts: Sequence[int] | None) -> str:
    return "None" if counts is None else str(list(counts))


ALONE = RankRows()
