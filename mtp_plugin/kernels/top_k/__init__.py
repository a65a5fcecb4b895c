"""Rows of logits -> partial reductions over pieces of the vocabulary.

One program per (row, piece), so that few rows still keep the whole device busy and many rows are
read once. The kernels that follow merge the pieces of a row.
"""

from mtp_plugin.kernels.top_k.launch import Top1Partials, no_partials, split, top1_partials

__all__ = ["Top1Partials", "no_partials", "split", "top1_partials"]
