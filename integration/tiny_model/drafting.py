"""The two ways to draft with the MTP layers, over all rows of a known text at once.

Row i of depth k joins a state of row i with the embedding of token i+k and predicts token i+k+1.

- chained: depth k is layer k, reads depth k-1's output and attends to the rows of its own depth.
- reused: every depth is layer 1, as an engine with one layer runs it. Depth k >= 2 is then a row
  that follows the verified ones, so it attends to depth 1's rows up to i, whose states are the
  target's, and to the guessed rows of its own chain, at position i+k-1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from integration.tiny_model.model import TinyMtpModel

MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DraftStates:
    """Output states per depth, each `[B, S, H]`; depth 1 is the same in both.

    There is one chained depth per MTP layer, and any number of reused depths.
    """

    chained: list[Tensor]
    reused: list[Tensor]


def reuse_rule(rows: int) -> MaskRule:
    """Which keys a row of a reused depth attends to; keys are depth 1's rows, 2's, and so on."""

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        row = key % rows
        return ((key < rows) & (row <= query)) | ((key >= rows) & (row == query))

    return allowed


def block_masks(rows: int, depths: int, device: torch.device) -> list[BlockMask]:
    """The masks of the reused depths 2 .. `depths` for flex attention."""
    return [
        create_block_mask(reuse_rule(rows), None, None, rows, depth * rows, device=device)
        for depth in range(2, depths + 1)
    ]


def dense_masks(rows: int, depths: int, device: torch.device) -> list[Tensor]:
    """The same masks as booleans `[rows, depth * rows]`, for short texts and for the CPU."""
    masks = []
    for depth in range(2, depths + 1):
        query = torch.arange(rows, device=device).unsqueeze(1)
        key = torch.arange(depth * rows, device=device).unsqueeze(0)
        masks.append(reuse_rule(rows)(query, query, query, key))
    return masks


def draft_states(
    model: TinyMtpModel,
    ids: Tensor,
    states: Tensor,
    masks: Sequence[BlockMask | Tensor],
) -> DraftStates:
    """Run both ways of drafting on the target's `states` of the first S tokens of `ids`.

    Args:
        model: the model.
        ids: token ids `[B, S + depths]` or longer; row i of depth k reads token i+k.
        states: the target's states after its final norm, `[B, S, H]`.
        masks: what `block_masks` or `dense_masks` gave for S rows, for the reused depths from 2 on.
    """
    rows = states.shape[1]
    depths = max(len(model.mtp), len(masks) + 1)
    embeddings = [model.embed(ids[:, k : k + rows]) for k in range(1, depths + 1)]
    first, key_value = model.mtp[0](embeddings[0], states, model.rotary(rows))

    chained = [first]
    for layer, embedding in zip(model.mtp[1:], embeddings[1:], strict=False):
        state, _ = layer(embedding, chained[-1], model.rotary(rows))
        chained.append(state)

    reused = [first]
    for depth, (mask, embedding) in enumerate(zip(masks, embeddings[1:], strict=False), start=1):
        rotary = model.rotary(rows, start=depth)
        state, key_value = model.mtp[0](embedding, reused[-1], rotary, mask, key_value)
        reused.append(state)
    return DraftStates(chained, reused)
