"""Compare sampled outputs and their logprobs with the expected ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from integration.bench.e2e.batch import Run
from integration.bench.e2e.gate import (
    STANDARD_ERRORS,
    Gate,
    Match,
    all_of,
    describe_differences,
)
from integration.bench.e2e.subject import Subject
from mtp_plugin.infer import SamplingRule
from mtp_plugin.requests.logprobs import Logprobs
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.tools.parity import (
    Comparison,
    Divergence,
    Oracle,
    TieRule,
    first_difference,
    measure_gap,
    transformers_attention,
)

LOGPROB_ERROR = 1e-3
"""Tolerance of logprobs if logits are exact up to float32 rounding."""


class SampledGate:
    """Compares runs of sampled requests.

    An unexpected token is checked with target-only logits after the output before it: it must be
    the token that the request's seed samples from them, or a tie.

    Args:
        gate: of the greedy runs.
        num_oracle_requests: requests of each run without MTP to compare with target-only decoding.
    """

    def __init__(self, subject: Subject, gate: Gate, num_oracle_requests: int) -> None:
        self._subject = subject
        self._gate = gate
        self._rule = TieRule(subject.dtype, gate.tie_ulps)
        self._num_oracle_requests = num_oracle_requests
        self._compared_runs: dict[tuple[object, ...], Comparison] = {}

    def match_oracle(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], run: Run
    ) -> Match:
        """Compare tokens and logprobs of some requests without MTP with target-only decoding.

        A sampled request is among them if there is one.
        """
        count = min(self._num_oracle_requests, len(prompts))
        found = self.match_tokens(prompts[:count], params[:count], run.token_ids[:count])
        with transformers_attention(self._subject.model):
            odd = [line for i in range(count) for line in self._logprobs(prompts, params, run, i)]
        return replace(found, mismatches=[*found.mismatches, *odd])

    def match_tokens(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        token_ids: Sequence[list[int]],
    ) -> Match:
        """Compare tokens with target-only decoding."""
        with transformers_attention(self._subject.model):
            found = [
                self._compare(prompt, given, tokens, 0)
                for prompt, given, tokens in zip(prompts, params, token_ids, strict=True)
            ]
        return Match(
            f"target-only decoding of {len(prompts)} requests with the same seeds",
            sum(len(tokens) for tokens in token_ids),
            sum(len(each.ties) for each in found),
            describe_differences(found),
        )

    def match_texts(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        runs: Sequence[Run],
        expected: Run,
    ) -> Match:
        """Compare every run with the ``expected`` tokens, which were decoded without drafts and may
        be longer."""
        return all_of(
            [self._match_text(prompts, params, run, expected) for run in _different(runs)]
        )

    def match_synthetic(self, accepted: Match, undrafted: Match) -> Match:
        """Merge the check of ids and acceptance rates under synthetic acceptance with the
        comparison of outputs whose drafts count as absent."""
        return Match(
            f"{accepted.compared_with}; with drafts absent, {undrafted.compared_with}",
            accepted.num_tokens + undrafted.num_tokens,
            undrafted.num_ties,
            [*accepted.mismatches, *undrafted.mismatches],
        )

    def match_law(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], runs: Sequence[Run]
    ) -> Match:
        """Check that tokens follow the target's distribution: the mean of their negative
        log-likelihood must be the entropy of their rows. Equal runs count once."""
        return all_of([self._match_draws(prompts, params, run) for run in _different(runs)])

    def _match_draws(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], run: Run
    ) -> Match:
        excess = variance = 0.0
        mismatches = []
        with transformers_attention(self._subject.model):
            oracle = Oracle(self._subject.model)
            for number, (prompt, given, tokens) in enumerate(
                zip(prompts, params, run.token_ids, strict=True)
            ):
                if len(tokens) != given.max_new_tokens:
                    mismatches.append(
                        f"request {number}: {len(tokens)} tokens, not {given.max_new_tokens}"
                    )
                    continue
                sampling = SamplingRule(given, prompt)
                rows = oracle.logits([*prompt, *tokens[:-1]], len(tokens))
                for position, token in enumerate(tokens):
                    shares = sampling.probabilities(rows[position], tokens[:position])
                    nll = torch.where(shares > 0, -shares.log(), 0.0)
                    if not shares[token] > 0:
                        mismatches.append(
                            f"request {number}, token {position + 1}: {token} has probability 0"
                        )
                    entropy = float((shares * nll).sum())
                    excess += float(nll[token]) - entropy
                    variance += float((shares * nll.square()).sum()) - entropy**2
        error = STANDARD_ERRORS * math.sqrt(max(variance, 0.0))
        if abs(excess) > error:
            mismatches.append(
                f"negative log-likelihood of all tokens: {excess:.1f} nats above the entropy, "
                f"expected within {error:.1f}"
            )
        return Match(
            "the entropy of the target's distribution, the expected negative log-likelihood",
            run.num_tokens,
            0,
            mismatches,
        )

    def missing_logprobs(self, params: Sequence[SamplingParams], runs: Sequence[Run]) -> list[str]:
        """Report requests without logprobs for every token."""
        return [
            f"request {number}: {0 if reported is None else len(reported)} log-probabilities of "
            f"{len(tokens)} tokens"
            for run in runs
            for number, (given, reported, tokens) in enumerate(
                zip(params, run.logprobs, run.token_ids, strict=True)
            )
            if given.logprobs is not None and (reported is None or len(reported) != len(tokens))
        ]

    def _match_text(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        run: Run,
        expected: Run,
    ) -> Match:
        found = []
        with transformers_attention(self._subject.model):
            for prompt, given, tokens, others in zip(
                prompts, params, run.token_ids, expected.token_ids, strict=True
            ):
                if len(tokens) != given.max_new_tokens:
                    short = Divergence(len(tokens), None, None)
                    found.append(Comparison(len(tokens), [], short))
                    continue
                position = first_difference(tokens, others[: len(tokens)])
                found.append(
                    Comparison(len(tokens))
                    if position is None
                    else self._compare(prompt, given, tokens, position)
                )
            odd = [
                line
                for i in range(len(prompts))
                for line in self._logprob_problems(prompts, params, run, i)
            ]
        return Match(
            "the run without MTP of the same seeds",
            run.num_tokens,
            sum(len(each.ties) for each in found),
            [*describe_differences(found), *odd],
        )

    def _compare(
        self, prompt: list[int], params: SamplingParams, tokens: list[int], start: int
    ) -> Comparison:
        """Compare every token from ``start`` on with the one sampled after the output before it."""
        plain = replace(params, logprobs=None, verification=None, draft_sampling=None)
        plain = replace(plain, speculate=True)
        key = (tuple(prompt), tuple(tokens), start, str(plain))
        if key not in self._compared_runs:
            self._compared_runs[key] = self._compared(prompt, plain, tokens, start)
        return self._compared_runs[key]

    def _compared(
        self, prompt: list[int], params: SamplingParams, tokens: list[int], start: int
    ) -> Comparison:
        if params.is_greedy:
            return self._gate.compare_greedy(prompt, tokens)
        oracle, sampling = Oracle(self._subject.model), SamplingRule(params, prompt)
        compare_gap = measure_gap(oracle, self._rule, sampling, tokens)
        rows = oracle.logits([*prompt, *tokens[:-1]], len(tokens) - start)
        ties: list[Divergence] = []
        for position, row in enumerate(rows, start):
            expected = sampling.choose(row, tokens[:position])
            if expected == tokens[position]:
                continue
            found = compare_gap(position, tokens[position], expected)
            if not found.is_tie:
                return Comparison(position, ties, found)
            ties.append(found)
        return Comparison(len(tokens), ties)

    def _logprob_problems(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], run: Run, number: int
    ) -> list[str]:
        """Check the logprobs of the first ``num_oracle_requests`` requests."""
        if number >= self._num_oracle_requests:
            return []
        return self._logprobs(prompts, params, run, number)

    def _logprobs(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], run: Run, number: int
    ) -> list[str]:
        """Describe wrong logprobs of a request."""
        num_top, reported, tokens = (
            params[number].logprobs,
            run.logprobs[number],
            run.token_ids[number],
        )
        if num_top is None:
            return []
        if reported is None or len(reported) != len(tokens):
            return self.missing_logprobs(params, [run])
        rows = Oracle(self._subject.model).logits([*prompts[number], *tokens[:-1]], len(tokens))
        return [
            f"request {number}, {line}"
            for line in self._odd_logprobs(rows, tokens, reported, num_top)
        ]

    def _odd_logprobs(
        self, rows: torch.Tensor, tokens: list[int], reported: Logprobs, num_top: int
    ) -> list[str]:
        """Describe the first token whose logprobs differ from those of its row [N, V]."""
        expected = rows.log_softmax(dim=-1)
        best = expected.topk(max(num_top, 1)).values.tolist()
        highest = rows.max(dim=-1).values.tolist()
        for i, (token, entries) in enumerate(zip(tokens, reported, strict=True)):
            # the row's own error, and that of the sum over it
            error = max(2 * self._rule.tolerance(highest[i]), LOGPROB_ERROR)
            pairs = [(entries[token].logprob, float(expected[i, token]))]
            first = sorted(
                (each.logprob for each in entries.values() if each.rank <= num_top), reverse=True
            )
            if len(first) != num_top:
                return [f"token {i + 1}: {len(first)} most likely tokens, expected {num_top}"]
            pairs += list(zip(first, best[i][:num_top], strict=True))
            wrong = [(ours, theirs) for ours, theirs in pairs if not abs(ours - theirs) <= error]
            if wrong:
                ours, theirs = wrong[0]
                return [
                    f"token {i + 1}: log-probability {ours:.4f}, expected {theirs:.4f} within "
                    f"{error:.4g}"
                ]
        return []


def _different(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with distinct outputs."""
    different: list[Run] = []
    for run in runs:
        if all(run.token_ids != other.token_ids for other in different):
            different.append(run)
    return different
