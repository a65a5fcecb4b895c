"""Steps with prompts return their tokens while the device still drafts, eagerly and in graphs."""

from __future__ import annotations

import pytest
import torch

from mtp_plugin.hosts.embedded import SamplingParams
from tests.hosts.embedded.conftest import assert_drained

SLEEP_CYCLES = 40_000_000  # about 20 ms before every draft pass
GRAPHS = [pytest.param([], id="eager"), pytest.param([64], id="graphs")]


def params(num_tokens: int, **options) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, **options)


@pytest.fixture
def slow_llm(harness):
    """Executors whose draft passes take much longer than everything else."""
    hook = harness.model.mtp_layers[0].register_forward_pre_hook(
        lambda *_: torch.cuda._sleep(SLEEP_CYCLES)
    )

    def build(prompt_tokens):
        graphs = {
            "batch_sizes": [1, 4],
            "enable_padding": True,
            "capture": "all",
            "prompt_tokens": prompt_tokens,
        }
        # the checks read lengths back, so they wait for the device
        unchecked = {"check_metadata": False}
        return harness.llm(cuda_graph_config=graphs, max_batch_size=4, mtp=unchecked)

    yield build
    hook.remove()


@pytest.mark.parametrize("prompt_tokens", GRAPHS)
def test_first_token_precedes_the_end_of_its_step(slow_llm, target, prompts, prompt_tokens):
    llm = slow_llm(prompt_tokens)
    executor, captured = llm.executor, llm.executor.engine.captured
    llm.generate([prompts[3]], [params(4)])  # the first steps may compile kernels for longer
    # the second and third prompt read what a replay of the same graph wrote
    for prompt in (prompts[3], prompts[4], prompts[5]):
        (request,) = llm.make_requests([prompt], [params(4)])
        executor.enqueue(request)
        replays = captured.num_replays
        assert executor.step() == []
        assert captured.num_replays - replays == len(prompt_tokens)
        end = torch.cuda.Event()
        end.record()
        (event,) = executor.step()
        assert not end.query()
        assert event.token_ids == target.greedy(prompt, 1)
        while executor.has_work:
            executor.step()
        assert request.output_token_ids == target.greedy(prompt, 4)
    assert_drained(llm)


@pytest.mark.parametrize("prompt_tokens", GRAPHS)
def test_slow_drafts_change_no_output(slow_llm, target, prompts, prompt_tokens):
    """Prompts arrive among running requests, so that steps of one shape follow each other."""
    llm = slow_llm(prompt_tokens)
    lengths = [4 + 3 * i for i in range(len(prompts))]
    want = [target.greedy(p, length) for p, length in zip(prompts, lengths, strict=True)]
    outputs = llm.generate(prompts, [params(length) for length in lengths])
    assert [output.token_ids for output in outputs] == want
    assert_drained(llm)


@pytest.mark.parametrize("prompt_tokens", GRAPHS)
def test_slow_drafts_change_no_logprobs(slow_llm, harness, prompts, prompt_tokens):
    sampled = params(6, temperature=0.8, seed=3, logprobs=2)
    late = harness.llm(disable_overlap_scheduler=True).generate(prompts, sampled)
    early = slow_llm(prompt_tokens).generate(prompts, sampled)
    for one, other in zip(early, late, strict=True):
        assert one.token_ids == other.token_ids
        for ranked, expected in zip(one.logprobs, other.logprobs, strict=True):
            assert ranked.keys() == expected.keys()
            for token, entry in ranked.items():
                assert entry.logprob == pytest.approx(expected[token].logprob, abs=1e-3)
