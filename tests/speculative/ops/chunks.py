"""What scans leave of chunks of rows, told by the shape of a piece."""

from __future__ import annotations

import torch

from mtp_plugin.speculative.row_sums import RowSums


def told_sums(logits: torch.Tensor) -> RowSums:
    """The highest values of chunks exactly, masses exact to double precision."""
    sums = RowSums.unwritten(logits)
    layout, (rows, vocab) = sums.layout, logits.shape
    values = logits.double().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    pieces = layout.num_pieces(vocab)
    spare = pieces * layout.piece - vocab
    values = torch.nn.functional.pad(values, (0, spare), value=-torch.inf)
    # so many neighbours of every turn of a piece's threads are of one chunk
    neighbours = layout.threads // layout.chunks * layout.each
    turns = layout.piece // (layout.chunks * neighbours)
    by_chunk = values.view(rows, pieces, turns, layout.chunks, neighbours)
    sums.tops.copy_(by_chunk.amax(dim=(2, 4)).reshape(sums.tops.shape))
    highest = values.amax(dim=1, keepdim=True)
    below = values - torch.where(highest > -torch.inf, highest, 0.0)
    sums.masses.copy_(below.exp().sum(dim=1))
    return sums


def check_sums(got: RowSums, told: RowSums, rows: torch.Tensor) -> None:
    """The highest values exactly, masses but for rounding; of these rows [N] bool."""
    assert torch.equal(got.tops[rows], told.tops[rows])
    rows = rows & (told.tops.amax(dim=1) < torch.inf)  # elsewhere nobody asks for the mass
    torch.testing.assert_close(got.masses[rows], told.masses[rows], rtol=1e-5, atol=0)
