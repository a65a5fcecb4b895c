"""A program with the sampling option ``positive_bias`` of CONTRIBUTING.md, in a patched package.

``python -m tests.ops.logits_processing.recipe_program`` runs in the folder of the copy. It fails
where torch, the kernels and the option applied by hand choose different tokens.
"""

from __future__ import annotations

import torch

from mtp_plugin import ops

BIASES = (-6.0, -6.0, -6.0, 3.0, 3.0, 0.0, -1.5, -1.5)
VOCAB = 9000
"""Enough that rows with top-k or top-p are read in part."""
KINDS = (
    {},
    {"temperature": 0.0},
    {"top_k": 5},
    {"top_p": 0.8},
    {"top_k": 5, "top_p": 0.8},
)


def main() -> None:
    torch.set_num_threads(1)
    logits = torch.randn(len(BIASES), VOCAB, generator=torch.Generator().manual_seed(1)) * 1.5
    added = torch.tensor(BIASES).unsqueeze(1)
    by_hand = torch.where(logits > 0, logits + added, logits)
    pools = ops.LogitsProcessorState.empty(1, VOCAB, "cpu")
    for n, bias in enumerate(BIASES):  # one by one: what is wrong may take long with top-p
        rows, row = ops.LogitRows.flat(torch.tensor([n])), slice(n, n + 1)
        given = {"temperature": 1.0, "seed": n, **KINDS[n % 5]}
        plain = ops.build_slot_rows([given], device="cpu")
        expected = ops.sample_tokens(by_hand[row], rows, plain, backend=ops.Backend.TORCH)
        named = [{**given, "positive_bias": bias}]
        slots = ops.build_slot_rows(named, pools=pools, device="cpu")
        for backend in ops.Backend:
            tokens = ops.sample_tokens(logits[row], rows, slots, backend=backend)
            if tokens.tolist() != expected.tolist():
                raise SystemExit(f"{backend.name}: row {n} differs")


if __name__ == "__main__":
    main()
