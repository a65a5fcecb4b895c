"""More launches of the sampling kernels, which take up to a minute each to compile.

With those of `launches`, every variant of the launch has a binary. They are not compiled for
smaller GPUs: none uses more than 8 KiB of shared memory, and except for loads of float16 their
instructions are those of the sampling and logits-processing kernels that are.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.sampling import Role, sample_tokens
from tests.compiled.launches import F16, F32, I64, VOCAB, floats, ints, slot_rows


def compile_sampling_of_processed_rows() -> None:
    requests = 8
    rows = LogitRows(0, 4, ints(requests, dtype=I64), drafts=ints(requests, 4))
    logits = floats(requests * 4, VOCAB)
    sample_tokens(logits, rows, slot_rows(requests), role=Role.TARGET, backend=Backend.TRITON)


def compile_sampling_of_drafts() -> None:
    for requests, vocab, dtype, has_pools in ((300, 202048, F16, True), (8, 32768, F32, False)):
        drafts = ints(requests, 4 if has_pools else 1)
        slots = slot_rows(requests, vocab if has_pools else VOCAB)
        sample_tokens(
            floats(requests, vocab, dtype=dtype),
            LogitRows(0, 1, ints(requests, dtype=I64), ints(requests), drafts=drafts),
            slots if has_pools else replace(slots, pools=None),
            as_drafts=True,
            vocab_ids=ints(vocab),
            truncation=floats(requests, 4, dtype=F32),
            backend=Backend.TRITON,
        )
