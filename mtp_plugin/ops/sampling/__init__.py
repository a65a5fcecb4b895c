"""Sampling: choose tokens from logits, and verify independently sampled drafts.

Words used in this package:

- *row*: one of the [N, V] rows of logits of a step (see `logit_rows`).
- *depth* of a token: (row maximum - logit) / temperature; its *weight* is exp(-depth).
- *truncation*: top-k, top-p and min-p; what remains are the *kept* tokens. Their description per
  row (`TRUNCATION_SIZE` numbers) lets later ops recompute the truncated distribution.
- *noise*: Gumbel noise -log(-log(u)); the argmax of scores plus noise is a sample of their softmax.
- *target tokens* are sampled from the target's logits, *drafts* from draft layers. Drafts are
  *coupled* (sampled with the noise of the target token at the same index, so that equal
  distributions give equal tokens), *independent* (`plain`), or *greedy*.
- *recovered distribution*: max(p - q, 0), which the token after a rejected draft is sampled from.

:func:`sample_tokens` does this to a row of logits:

1. Process the logits: bias, allowed tokens, penalties (see `logit_rows`).
2. Greedy requests (temperature below 1e-5) return the argmax; the steps below do not apply.
3. Subtract the row's maximum and divide by the temperature.
4. Top-k: keep the k highest scores.
5. Top-p: of those, keep the smallest set of tokens whose cumulative probability reaches top_p: of
   the mass of those tokens, or of another one, by the request's column ``top_p_mass``.
6. Min-p: of those, keep tokens at least ``min_p`` times as likely as the most likely one. Ties at a
   threshold keep the lowest ids.
7. Add Gumbel noise from Philox-4x32-10. The key is the request's seed; the counter is token id,
   absolute token index and role, so the noise does not depend on the batch or the draft length.
8. Return the argmax.

Drafts that are coupled or greedy are then verified by equality with the target tokens
(`ops.acceptance`). Independent drafts go through rejection sampling:

9. While drafting, :func:`keep_draft_probs` stores the truncated distribution q of each draft.
10. :func:`rejection_sample` accepts drafts by p / q, one by one or as a block.
11. After the accepted drafts it samples a token from the recovered distribution, or the bonus token
    from p if all drafts were accepted.

:func:`processed_scores` returns the scores of steps 1 to 6, for processed log-probabilities.

Modules: ``sample``, ``processed`` and ``rejection`` have the public functions, ``*_reference`` the
torch implementations, ``*_triton`` the kernels. Kernels share ``row_triton`` (options, noise, kept
tokens of a row) and the ``truncation*_triton`` modules (steps 4 to 8; see README.md).
"""

from mtp_plugin.ops.sampling.processed import processed_scores
from mtp_plugin.ops.sampling.rejection import keep_draft_probs, rejection_sample
from mtp_plugin.ops.sampling.sample import SAMPLING_OPTIONS, sample_tokens
from mtp_plugin.ops.sampling.types import (
    DRAFT_COLUMNS,
    STEP_COLUMN,
    TRUNCATION_SIZE,
    DraftedBy,
    ProposedDrafts,
    RejectionResult,
    Role,
    TargetSamples,
    VerifiedBy,
)

__all__ = [
    "DRAFT_COLUMNS",
    "SAMPLING_OPTIONS",
    "STEP_COLUMN",
    "TRUNCATION_SIZE",
    "DraftedBy",
    "ProposedDrafts",
    "RejectionResult",
    "Role",
    "TargetSamples",
    "VerifiedBy",
    "keep_draft_probs",
    "processed_scores",
    "rejection_sample",
    "sample_tokens",
]
