"""The token ids that a worker drafts from."""

from __future__ import annotations

import torch

from mtp_plugin.config.draft_vocab import KEY
from mtp_plugin.errors import ConfigError, expect


def place_draft_vocab(
    option: int | str | None, ids: torch.Tensor | None, device: torch.device | str
) -> torch.Tensor | None:
    """Return the ids that a worker drafts from, [V'] int32 on ``device``; None: all.

    Args:
        option: ``mtp.draft_vocab`` of the worker's config. ids: ``draft_vocab_ids`` of the worker.

    Raises:
        ConfigError: ``option`` without ids, or ids that are no vector of torch.int32.
    """
    if ids is None:
        expect(
            option is None,
            ConfigError,
            f"{KEY}: {option!r} would be ignored; expected draft_vocab_ids with it",
        )
        return None
    expect(
        ids.dim() == 1 and ids.shape[0] > 0 and ids.dtype == torch.int32,
        ConfigError,
        "draft_vocab_ids: expected a vector of torch.int32, one id or more, got "
        f"{ids.dtype} {list(ids.shape)}",
    )
    return ids.to(device=device).contiguous()
