"""More launches of the largest kernels there are, that draw tokens: up to a minute each.

With those of `launches` every choice of the launch has a binary. A smaller GPU is spared these:
none holds more than 8 KiB of its shared memory, and but for loads of float16 their instructions
are those of the draws and the edits that it gets.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative.logit_rows import DrawnRows
from mtp_plugin.speculative.ops.sampling import Role, draw
from tests.compiled.launches import F16, F32, I64, VOCAB, floats, ints, slot_rows


def compile_draws_of_edited_rows() -> None:
    requests = 8
    rows = DrawnRows(0, 4, ints(requests, dtype=I64), drafts=ints(requests, 4))
    logits = floats(requests * 4, VOCAB)
    draw(logits, rows, slot_rows(requests), role=Role.TARGET, backend=Backend.TRITON)


def compile_draws_by_choice() -> None:
    for requests, vocab, dtype, has_pools in ((300, 202048, F16, True), (8, 32768, F32, False)):
        drafts = ints(requests, 4 if has_pools else 1)
        slots = slot_rows(requests, vocab if has_pools else VOCAB)
        draw(
            floats(requests, vocab, dtype=dtype),
            DrawnRows(0, 1, ints(requests, dtype=I64), ints(requests), drafts=drafts),
            slots if has_pools else replace(slots, pools=None),
            by_choice=True,
            vocab_ids=ints(vocab),
            cuts=floats(requests, 4, dtype=F32),
            backend=Backend.TRITON,
        )
