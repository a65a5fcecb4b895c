"""The sums that scans store of chunks of rows, computed from the chunk layout."""

from __future__ import annotations

import torch

from mtp_plugin.ops.row_sums import RowSums


def reference_sums(logits: torch.Tensor) -> RowSums:
    """The highest values of chunks exactly, masses exact to double precision."""
    sums = RowSums.unwritten(logits)
    layout, (rows, vocab) = sums.layout, logits.shape
    values = logits.double().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    blocks = layout.num_blocks(vocab)
    spare = blocks * layout.block - vocab
    values = torch.nn.functional.pad(values, (0, spare), value=-torch.inf)
    # so many neighbours of every pass of a block's threads belong to one chunk
    neighbours = layout.threads // layout.chunks * layout.each
    turns = layout.block // (layout.chunks * neighbours)
    by_chunk = values.view(rows, blocks, turns, layout.chunks, neighbours)
    sums.tops.copy_(by_chunk.amax(dim=(2, 4)).reshape(sums.tops.shape))
    highest = values.amax(dim=1, keepdim=True)
    below = values - torch.where(highest > -torch.inf, highest, 0.0)
    sums.masses.copy_(below.exp().sum(dim=1))
    return sums


def check_sums(got: RowSums, expected: RowSums, rows: torch.Tensor) -> None:
    """Compare highest values exactly, masses up to rounding, in rows [N] bool."""
    assert torch.equal(got.tops[rows], expected.tops[rows])
    rows = rows & (expected.tops.amax(dim=1) < torch.inf)  # otherwise the mass is not read
    torch.testing.assert_close(got.masses[rows], expected.masses[rows], rtol=1e-5, atol=0)
