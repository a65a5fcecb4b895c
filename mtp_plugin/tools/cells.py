"""The grid of ``parity``: a config for every worker, draft length and batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from mtp_plugin.config import MAX_DRAFT_LEN, LLMConfig, MTPDecodingConfig
from mtp_plugin.errors import ConfigError

NO_DRAFTS, EAGLE, VANILLA = "none", "eagle", "vanilla"


@dataclass(frozen=True)
class Cell:
    """One configuration of the executor."""

    config: LLMConfig

    @property
    def worker(self) -> str:
        """`EAGLE`, `VANILLA`, `NO_DRAFTS`, or the decoding type of another package."""
        speculative = self.config.speculative_config
        if isinstance(speculative, MTPDecodingConfig):
            return VANILLA if speculative.use_mtp_vanilla else EAGLE
        return NO_DRAFTS if speculative is None else speculative.decoding_type

    @property
    def k(self) -> int:
        """The draft length."""
        speculative = self.config.speculative_config
        return speculative.draft_len if isinstance(speculative, MTPDecodingConfig) else 0

    @property
    def num_draft_layers(self) -> int:
        """MTP layers that must be loaded."""
        return self.k if self.worker == VANILLA else min(self.k, 1)

    @property
    def drafts(self) -> str:
        """Name of worker and draft length."""
        return self.worker if self.worker == NO_DRAFTS else f"{self.worker} K={self.k}"

    @property
    def label(self) -> str:
        """Name of worker, draft length and batch size."""
        return f"{self.drafts} batch {self.config.max_batch_size}"


def make_grid(
    settings: LLMConfig,
    num_mtp_layers: int | None,
    workers: Sequence[str] = (),
    ks: Sequence[int] = (),
    batch_sizes: Sequence[int] = (),
) -> list[Cell]:
    """Return every combination; ``settings`` has the defaults.

    Args:
        num_mtp_layers: MTP layers of the checkpoint, the default of K; None: not known yet, and
            what depends on it is neither checked nor filled in.

    Raises:
        ConfigError: the checkpoint cannot run a combination.
    """
    too_many = [k for k in ks if k > MAX_DRAFT_LEN]
    if too_many:
        raise ConfigError(f"--k: expected at most {MAX_DRAFT_LEN} drafts, got {too_many[0]}")
    found = []
    for worker, k, size in product(
        workers or (None,), ks or (None,), batch_sizes or (settings.max_batch_size,)
    ):
        config = _combined(settings, worker, k, size, num_mtp_layers)
        found.append(Cell(config if num_mtp_layers is None else config.resolve(num_mtp_layers)))
    return found


def _combined(
    settings: LLMConfig,
    worker: str | None,
    k: int | None,
    batch_size: int,
    num_mtp_layers: int | None = None,
) -> LLMConfig:
    """Return the settings with another worker, draft length and batch size; None: theirs."""
    values = settings.model_dump()
    speculative = values["speculative_config"]
    if worker is not None or k is not None:
        speculative = {"decoding_type": "MTP"} if speculative is None else speculative
        if worker is not None:
            speculative["use_mtp_vanilla"] = worker == VANILLA
        if k is not None:
            speculative |= {"max_draft_len": k, "draft_len_schedule": None}
    values |= {"max_batch_size": batch_size, "speculative_config": speculative}
    graphs = values["cuda_graph_config"]
    if graphs is not None and batch_size != settings.max_batch_size:
        values["cuda_graph_config"] = {**graphs, "batch_sizes": None, "max_batch_size": None}
    drafts = (speculative or {}).get("max_draft_len") or max(num_mtp_layers or 1, 1)
    values["max_num_tokens"] = max(settings.max_num_tokens, batch_size * (1 + drafts))
    return LLMConfig.model_validate(values)
