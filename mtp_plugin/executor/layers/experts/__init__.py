"""A mixture of experts: rows -> their experts -> blocks of rows by expert -> two products -> rows.

R rows, E routed experts of which each row takes ``top_k``, and ``shared`` experts behind them that
every row takes. A pair is a row and one of its experts, ``row * slots + slot``. Pairs lie in blocks
of one expert each. How many blocks are filled is known on the device alone; grids cover the most
there can be, so that a step can be captured whatever the router says.
"""

from mtp_plugin.executor.layers.experts.contract import Blocks, RouterRule, block_rows_for
from mtp_plugin.executor.layers.experts.door import assign, combine, down, gate_up, router_logits

__all__ = [
    "Blocks",
    "RouterRule",
    "assign",
    "block_rows_for",
    "combine",
    "down",
    "gate_up",
    "router_logits",
]
