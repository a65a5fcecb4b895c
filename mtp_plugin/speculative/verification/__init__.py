"""Verification: from the target model's logits to the accepted tokens of a step.

Words used in this package:

- *generation*: a request that generates; it has K+1 rows of logits, for its K drafts and the token
  after them. A *context* is a request with a prompt chunk; it has one row, that of its last token.
- *draft tokens* were proposed by the MTP layers in the step before. Their *kind*, option
  ``draft_sampling``, is *greedy* (the argmax of the draft's logits), *coupled* (sampled with the
  target's noise) or *plain* (sampled independently).
- *draft probability* q(d): probability with which a plain draft d was sampled, after temperature
  and truncation (top-k, top-p, min-p); 1 for a greedy draft. The manager keeps the distributions
  of plain drafts in ``draft_probs``.
- *target token* of a row: the argmax for greedy requests; else it is sampled from the row.
  *Target probability* p(d): that of a draft in its row, after temperature and truncation.
- *accepted drafts*: the leading drafts that the verification method accepts. No draft after a
  rejected one counts.
- *bonus token*: the target's token after the accepted drafts, also after a rejected one, where
  vLLM calls it the recovered token. The output of a step is the accepted drafts and the bonus
  token, 1 to K+1 tokens.
- *recovered distribution* (residual distribution): max(p - q, 0), normalized. Rejection sampling
  samples the token after a rejected draft from it.
- *lossless*: sampled output equals that of non-speculative decoding with the same seed, or, for
  rejection sampling, has the same distribution.
- *ragged rows*: as many rows per generation as it has drafts, and one more, as in vLLM. Modes that
  read rows get K+1 per generation, and ``draft_lens`` says how many drafts count.
- `SamplingKind`: what the requests of a step need at most. GREEDY: the argmax; SAMPLED: some
  sample or return log-probabilities; PROCESSED: some change their logits (penalties, bias, masks,
  thinking budgets).

Every host engine verifies here. :class:`VerificationInputs` are the rows of a step: a worker builds
them from the step of its host (`drafting.make_verification_inputs`), the vLLM adapter from vLLM's
batch.

A *mode* (:class:`VerificationMode`) implements one or more verification methods. A config enables
modes; if it enables several of the methods ``coupled``, ``rejection``, ``block`` and those from
outside the package, a request selects one with its option ``verification``:

- ``coupled`` (:class:`StrictVerification`): a draft is accepted if it is the target token.
  Lossless. With coupled drafts target and draft use the same noise, so equal distributions give
  equal tokens.
- ``rejection``, ``block`` (:class:`RejectionVerification`): for requests that sample. Accepts
  drafts with probability min(1, p / q), one by one or as a block. Lossless in distribution.
- methods from outside the package (:class:`CustomVerificationMode`): `register_verification` or an
  entry point gives them a name. A :class:`CustomVerification` returns numbers of accepted drafts.
- relaxed acceptance (:class:`RelaxedVerification`): enabled by
  ``use_relaxed_acceptance_for_thinking``. While a greedy request thinks, a draft among the
  ``relaxed_topk`` most probable tokens of its row is accepted if its probability is at least
  the highest one - ``relaxed_delta``. Not lossless.
- ``synthetic`` (`SyntheticVerification`): accepts drafts at random at given rates, for benchmarks.
  Not lossless.

:meth:`Verifier.verify` does this to the [C + G*(K+1), V] rows of logits of a step:

1. GREEDY: the target token of a row is its argmax; continue with step 7 and end with step 8.
2. PROCESSED: mask the tokens that would complete a bad word, and stop ids before ``min_tokens``.
   The logits get their old values back after step 9.
3. Determine the target token of every row (`ops.sampling`): process the logits (bias, allowed
   tokens, penalties); greedy requests take the argmax; for the others apply temperature and
   truncation, add Gumbel noise and take the argmax. Processed values are not stored.
4. PROCESSED: where a thinking budget is spent, the next token of the end-of-thinking sequence
   becomes the target token.
5. Make the `AcceptanceRules`: a draft is accepted if it is the target token of its row. If a mode
   reads rows, ragged ones are expanded. Modes that no request of the step selects do not run, if
   the host lists the step's methods; what a mode decides about other requests is dropped.
6. ``rejection`` and ``block``: test the drafts of requests that select them. The rules get the
   number of accepted drafts, and as target token after them one from the recovered distribution,
   or from p if all were accepted. Methods from outside the package: likewise, for requests with
   and without a temperature, without a change of target tokens.
7. Other enabled modes extend the rules: relaxed acceptance by its limits, synthetic verification
   by numbers of accepted drafts.
8. `ops.acceptance.accept` counts the accepted drafts by the rules in one launch, appends the bonus
   token, and updates the thinking phase of relaxed acceptance. A context outputs its target token,
   or nothing while its prompt has more chunks.
9. ``logprobs_mode: processed``: compute the scores that target tokens were sampled from, for
   log-probabilities.
10. PROCESSED: update the token history (penalties, bad words) and the thinking state (budgets) by
    the output tokens.

``draft_rules`` has the choice of the drafts for the next step.

Modules: ``mode`` is the base class, ``registry`` lists the modes, ``verifier`` runs those of a
worker. One file per mode: ``strict``, ``rejection``, ``custom``, ``relaxed``, ``synthetic``.
``method_choice`` resolves the options of requests.
"""

from mtp_plugin.speculative.verification.custom import (
    CustomVerification,
    CustomVerificationMode,
    call_custom,
    count_accepted,
    custom_verifications,
    failure_of,
    record_failure,
    register_verification,
    unregister_verification,
)
from mtp_plugin.speculative.verification.draft_rules import DraftPass
from mtp_plugin.speculative.verification.mode import (
    DELTA_POOL,
    VerificationInputs,
    VerificationMode,
)
from mtp_plugin.speculative.verification.registry import (
    BUILT,
    MODES,
    changes_text,
    check_modes,
    label_of,
    make_modes,
    most_draft_probs,
    refusals,
)
from mtp_plugin.speculative.verification.rejection import RejectionVerification
from mtp_plugin.speculative.verification.relaxed import RelaxedVerification
from mtp_plugin.speculative.verification.strict import StrictVerification
from mtp_plugin.speculative.verification.verifier import Verifier

__all__ = [
    "BUILT",
    "DELTA_POOL",
    "MODES",
    "CustomVerification",
    "CustomVerificationMode",
    "DraftPass",
    "RejectionVerification",
    "RelaxedVerification",
    "StrictVerification",
    "VerificationInputs",
    "VerificationMode",
    "Verifier",
    "call_custom",
    "changes_text",
    "check_modes",
    "count_accepted",
    "custom_verifications",
    "failure_of",
    "label_of",
    "make_modes",
    "most_draft_probs",
    "record_failure",
    "refusals",
    "register_verification",
    "unregister_verification",
]
