"""Options of ``parity``, checked before slow imports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mtp_plugin.config import MAX_DRAFT_LEN, LLMConfig
from mtp_plugin.errors import ConfigError

EAGLE, VANILLA = "eagle", "vanilla"


def on(
    settings: LLMConfig, *, dtype: str | None, device: str | None, graphs: bool | None
) -> LLMConfig:
    """Return the settings with the given dtype, device and use of CUDA graphs.

    Raises:
        ConfigError: a value is invalid, or the values are incompatible.
    """
    values = settings.model_dump()
    values |= {name: v for name, v in (("dtype", dtype), ("device", device)) if v is not None}
    if graphs is not None:
        values["cuda_graph_config"] = {"enable_padding": True} if graphs else None
    elif device == "cpu":
        values["cuda_graph_config"] = None
    return LLMConfig.model_validate(values)


def combinations(
    settings: LLMConfig,
    num_mtp_layers: int | None,
    *,
    workers: Sequence[str],
    ks: Sequence[int],
    batch_sizes: Sequence[int],
) -> Iterator[LLMConfig]:
    """Yield a config for every combination; ``settings`` has the defaults.

    Args:
        num_mtp_layers: MTP layers of the checkpoint, the default of K; None: not known yet.

    Raises:
        ConfigError: no checkpoint can run a combination, or this one cannot if its number of MTP
            layers is known.
    """
    too_many = [k for k in ks if k > MAX_DRAFT_LEN]
    if too_many:
        raise ConfigError(f"--k: expected at most {MAX_DRAFT_LEN} drafts, got {too_many[0]}")
    for worker in workers or (None,):
        for k in ks or (None,):
            for batch_size in batch_sizes or (settings.max_batch_size,):
                config = _combined(settings, worker, k, batch_size, num_mtp_layers or 1)
                yield config if num_mtp_layers is None else config.resolve(num_mtp_layers)


def check_combinations(
    settings: LLMConfig, *, workers: Sequence[str], ks: Sequence[int], batch_sizes: Sequence[int]
) -> None:
    """Check all combinations without the checkpoint.

    Raises:
        ConfigError: see `combinations`.
    """
    for _ in combinations(settings, None, workers=workers, ks=ks, batch_sizes=batch_sizes):
        pass


def _combined(
    settings: LLMConfig, worker: str | None, k: int | None, batch_size: int, num_mtp_layers: int
) -> LLMConfig:
    values = settings.model_dump()
    speculative: dict[str, Any] | None = values["speculative_config"]
    if worker is not None or k is not None:
        speculative = {"decoding_type": "MTP"} if speculative is None else dict(speculative)
        if worker is not None:
            speculative["use_mtp_vanilla"] = worker == VANILLA
        if k is not None:
            speculative |= {"max_draft_len": k, "draft_len_schedule": None}
    values |= {"max_batch_size": batch_size, "speculative_config": speculative}
    graphs = values["cuda_graph_config"]
    if graphs is not None and batch_size != settings.max_batch_size:
        values["cuda_graph_config"] = {**graphs, "batch_sizes": None, "max_batch_size": None}
    drafts = (speculative or {}).get("max_draft_len") or max(num_mtp_layers, 1)
    values["max_num_tokens"] = max(settings.max_num_tokens, batch_size * (1 + drafts))
    return LLMConfig.model_validate(values)
