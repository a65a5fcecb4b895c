"""A third-party drafter is lossless in both loops, without any MTP layer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from integration.examples.ngram.plugin import NgramPlugin, TokenPool, look_up
from integration.random_models import write_random_checkpoint
from mtp_plugin.errors import ConfigError, PluginError
from mtp_plugin.hosts.embedded import LLM, SamplingParams
from mtp_plugin.hosts.embedded.models import LoadedModel, load_model
from mtp_plugin.infer import decode
from mtp_plugin.plugin import register_plugin, unregister_plugin
from mtp_plugin.requests.states import CUDA_GRAPH_DUMMY_REQUEST_ID
from mtp_plugin.speculative.host import ResourceManager
from tests.greedy import greedy_decode

VOCAB = 64


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register_plugin(NgramPlugin())
    yield
    unregister_plugin("NGRAM_TEST")


class Engines:
    """A small model without MTP layers, and executors over it."""

    def __init__(self, path: Path, residual_scale: float) -> None:
        self.path = str(path)
        write_random_checkpoint(
            path,
            "glm4_moe",
            num_mtp_layers=0,
            seed=6,
            vocab_size=VOCAB,
            residual_scale=residual_scale,
        )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model: LoadedModel = load_model(path, device=device)
        self.plain = load_model(path, device=device).target

    def llm(self, **options: Any) -> LLM:
        given = {
            "model": self.path,
            "max_batch_size": 4,
            "max_num_tokens": 64,
            "max_seq_len": 96,
            "kv_cache_config": {"tokens_per_block": 4, "max_tokens": 512},
            "speculative_config": {"decoding_type": "ngram_test", "max_draft_len": 3},
            **options,
        }
        return LLM(given, model=self.model)

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        return greedy_decode(self.plain, prompt, num_tokens, self.model.facts.eos_token_ids)


@pytest.fixture(scope="module")
def repeating(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """The next token follows from the last one, so that every text runs into a circle."""
    return Engines(tmp_path_factory.mktemp("repeating"), residual_scale=0.0)


@pytest.fixture(scope="module")
def wandering(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Texts that hardly repeat."""
    return Engines(tmp_path_factory.mktemp("wandering"), residual_scale=1.0)


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(2, VOCAB) for _ in range(length)] for length in lengths]


LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])


@LOOPS
def test_a_repeating_output_is_predicted(repeating: Engines, overlap: bool) -> None:
    """More than two tokens per step, and the very tokens of target-only decoding."""
    inputs = prompts(1, 3, 8, 20, 5)
    with repeating.llm(disable_overlap_scheduler=not overlap) as llm:
        outputs = llm.generate(inputs, SamplingParams(max_new_tokens=40, ignore_eos=True))
        acceptance = llm.executor.acceptance
    for prompt, output in zip(inputs, outputs, strict=True):
        assert output.token_ids == greedy_decode(repeating.plain, prompt, 40)
    assert acceptance.acceptance_length > 2.0
    assert acceptance.per_position[2] > 0.3


@LOOPS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_tokens": 17},
        {"kv_cache_config": {"tokens_per_block": 4, "max_tokens": 64}},
        {"speculative_config": {"decoding_type": "NGRAM_TEST", "max_draft_len": 1, "ngram": 1}},
    ],
    ids=["roomy", "chunks", "preemption", "one_draft"],
)
def test_any_text_is_that_of_target_only_decoding(
    wandering: Engines, overlap: bool, options: dict[str, Any]
) -> None:
    inputs = prompts(2, 25, 7, 1, 12, 30)
    with wandering.llm(disable_overlap_scheduler=not overlap, **options) as llm:
        outputs = llm.generate(inputs, SamplingParams(max_new_tokens=20))
        slots = llm.pieces.manager.slot_manager
        assert sorted(slots.free_slots) == list(range(slots.max_num_requests))
    for prompt, output in zip(inputs, outputs, strict=True):
        assert output.token_ids == wandering.greedy(prompt, 20)
    assert any(output.acceptance.num_drafted for output in outputs)


@LOOPS
def test_penalties_and_sampling_of_a_third_party_plugin(wandering: Engines, overlap: bool) -> None:
    inputs = prompts(2, 25, 7, 12)
    params = [
        SamplingParams(max_new_tokens=20, ignore_eos=True, repetition_penalty=1.3),
        SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=0.8, seed=3),
        SamplingParams(max_new_tokens=20, ignore_eos=True, logit_bias={4: 2.0, 9: -3.0}),
        SamplingParams(max_new_tokens=20, ignore_eos=True),
    ]
    with wandering.llm(disable_overlap_scheduler=not overlap) as llm:
        outputs = llm.generate(inputs, params)
    for prompt, one, output in zip(inputs, params, outputs, strict=True):
        assert output.token_ids == decode(wandering.plain, prompt, one).token_ids


def test_preemption_happens(wandering: Engines) -> None:
    """The short cache of the test above pauses requests, whose texts start over in new slots."""
    inputs = prompts(2, 25, 7, 1, 12, 30)
    cache = {"tokens_per_block": 4, "max_tokens": 64}
    with wandering.llm(kv_cache_config=cache) as llm:
        requests = [llm.make_request(p, SamplingParams(max_new_tokens=20)) for p in inputs]
        for request in requests:
            llm.executor.enqueue(request)
        while llm.executor.has_work:
            llm.executor.step()
    assert any(request.num_preemptions for request in requests)


def test_the_longest_sequence(repeating: Engines) -> None:
    """Texts that fill their rows to the last column."""
    (prompt,) = prompts(90)
    with repeating.llm(max_num_tokens=96) as llm:
        (output,) = llm.generate([prompt], SamplingParams(max_new_tokens=40, ignore_eos=True))
    assert len(output.token_ids) == 6
    assert output.token_ids == greedy_decode(repeating.plain, prompt, 6)


def test_padded_batches(repeating: Engines) -> None:
    """Dummy rows write to the sentinel's text and to no other."""
    inputs = prompts(4, 9, 2)
    graphs = {"batch_sizes": [4], "enable_padding": True}
    with repeating.llm(cuda_graph_config=graphs) as llm:
        outputs = llm.generate(inputs, SamplingParams(max_new_tokens=24, ignore_eos=True))
    for prompt, output in zip(inputs, outputs, strict=True):
        assert output.token_ids == greedy_decode(repeating.plain, prompt, 24)


def test_options_are_the_plugins_own(repeating: Engines) -> None:
    config = {"decoding_type": "NGRAM_TEST", "max_draft_len": 2, "temperature": 1}
    with pytest.raises(ConfigError, match="unknown options temperature"):
        repeating.llm(speculative_config=config)
    with pytest.raises(PluginError, match=r"known: mtp, .*ngram_test"):
        repeating.llm(speculative_config={"decoding_type": "NGRAM"})


# --- the look-up ---


def format_value(tokens: list[int], ngram: int, k: int) -> list[int]:
    """The same over a list."""
    newest = tokens[-ngram:]
    for end in range(len(tokens) - 1, ngram - 1, -1):
        if tokens[end - ngram : end] == newest:
            following = tokens[end:]
            return [following[i % len(following)] for i in range(k)]
    return [0] * k


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([5, 6, 7, 8, 5, 6], [7, 8, 5]),
        ([5, 6, 5, 6], [5, 6, 5]),
        ([5, 6, 9, 5, 6, 8, 5, 6], [8, 5, 6]),
        ([5, 6, 7], [0, 0, 0]),
        ([4, 4, 4], [4, 4, 4]),
        ([6], [0, 0, 0]),
    ],
    ids=["found", "circle", "the_last_place", "nowhere", "overlapping", "too_short"],
)
def test_look_up(tokens: list[int], drafts: list[int]) -> None:
    text = torch.tensor([tokens + [9] * (12 - len(tokens))], dtype=torch.int32)
    found = look_up(text, torch.tensor([len(tokens)]), 2, 3)
    assert found.tolist() == [drafts]
    assert format_value(tokens, 2, 3) == drafts


@pytest.mark.parametrize("seed", range(20))
def test_look_up_in_a_batch(seed: int) -> None:
    rng = random.Random(seed)
    ngram, k = rng.randint(1, 3), rng.randint(1, 4)
    texts = [[rng.randrange(3) for _ in range(rng.randint(1, 15))] for _ in range(6)]
    rows = [tokens + [rng.randrange(3) for _ in range(16 - len(tokens))] for tokens in texts]
    lengths = torch.tensor([len(tokens) for tokens in texts])
    found = look_up(torch.tensor(rows, dtype=torch.int32), lengths, ngram, k)
    assert found.dtype == torch.int32
    assert found.tolist() == [format_value(tokens, ngram, k) for tokens in texts]


# --- components ---


def test_components(wandering: Engines) -> None:
    """Slots with request options and tokens; no pools of past hidden states."""
    with wandering.llm() as llm:
        pieces = llm.pieces
        manager, metadata = pieces.manager, pieces.make_metadata()
        assert isinstance(manager, TokenPool)
        assert isinstance(manager, ResourceManager)
        assert manager.tokens.shape == (manager.num_rows, 97)
        assert not hasattr(manager, "mtp_past_tokens_pool")
        size = 4 * (72 + 97)  # what every slot has, and the text
        assert pieces.memory_report().startswith("texts ")
        assert f"({manager.num_rows} slots of {size} bytes)" in pieces.memory_report()
        params = SamplingParams(stop_token_ids=(9,), ignore_eos=True)
        request = llm.make_request([1, 2, 3], params)
        manager.prepare_resources(SimpleNamespace(context_requests=[request]))
        slot = pieces.slot_of(request.request_id)
        # the ignored end token is kept too
        assert manager.table.column("stop_ids")[slot, :3].tolist() == [9, 1, -1]
        assert pieces.slot_of(CUDA_GRAPH_DUMMY_REQUEST_ID) == manager.sentinel_slot
        assert pieces.device_store().new_tokens.shape[1] == 8
        captured = pieces.make_graph_metadata(metadata, 2)
        assert (captured.is_cuda_graph, captured.max_num_requests) == (True, 2)
        manager.free_resources(request)


@LOOPS
def test_min_tokens(wandering: Engines, overlap: bool) -> None:
    """What the ops of verification serve, every plugin that uses them does."""
    prompt, count = prompts(7)[0], 16
    stop = greedy_decode(wandering.plain, prompt, count)[1]
    with wandering.llm(disable_overlap_scheduler=not overlap) as llm:
        assert "min_tokens" in llm.pieces.served_options
        for least in (0, 5):
            params = SamplingParams(
                max_new_tokens=count, ignore_eos=True, stop_token_ids=(stop,), min_tokens=least
            )
            (output,) = llm.generate([prompt], params)
            assert output.token_ids == greedy_decode(
                wandering.plain, prompt, count, (stop,), min_tokens=least
            )
