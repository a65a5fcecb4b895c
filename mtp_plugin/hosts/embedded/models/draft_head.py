"""An LM head with a reduced vocabulary, for drafts."""

from __future__ import annotations

import torch
from torch import nn

from mtp_plugin.errors import ConfigError


@torch.no_grad()
def cut_head(head: nn.Module, ids: torch.Tensor) -> nn.Linear:
    """Return a head whose logits [R, V'] are the columns ``ids`` of those of ``head`` [R, V].

    The rows are copied, with the same dtype and device: V' * H numbers of memory.

    Args:
        ids: [V'] of integers.

    Raises:
        ConfigError: the head is more than a product with its weight, so that selecting rows of the
            weight is not enough.
    """
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise ConfigError(
            "mtp.draft_vocab: expected an LM head that is a linear layer, to take its rows, got "
            f"{type(head).__name__}"
        )
    rows = ids.to(head.weight.device, torch.int64)
    cut = nn.Linear(head.in_features, len(rows), bias=head.bias is not None, device="meta")
    cut.weight = nn.Parameter(head.weight.index_select(0, rows), requires_grad=False)
    if head.bias is not None:
        cut.bias = nn.Parameter(head.bias.index_select(0, rows), requires_grad=False)
    return cut.eval()
