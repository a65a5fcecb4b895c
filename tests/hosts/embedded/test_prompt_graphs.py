"""Steps with prompts in graphs: the chunks' lengths are read on the device.

Without a GPU the graphs are substitutes that launch their step again, over the captured shape's own
lengths on the host (`replays.EagerReplays`), and attention runs interpreted.
"""

from __future__ import annotations

import pytest
import torch

from mtp_plugin.hosts.embedded import SamplingParams
from mtp_plugin.hosts.embedded.prompt_steps import (
    CAPTURED_CHUNKS,
    PromptChunks,
    distinct_shapes,
    fitting_shape,
    prompt_shapes,
)
from mtp_plugin.hosts.embedded.row_table import StepShape
from mtp_plugin.ops.step import SamplingKind
from tests.hosts.embedded.conftest import assert_drained, pads_batches
from tests.hosts.embedded.replays import WatchedGraphs

NUM_TOKENS = 4


@pytest.fixture
def graphed(harness, monkeypatch):
    """Executors whose steps run in graphs, of up to 4 generations and 24 prompt tokens."""
    pads_batches(harness)

    def build(prompt_tokens=(24,), **options) -> WatchedGraphs:
        graphs = {
            "batch_sizes": [4],
            "enable_padding": True,
            "capture": "all",
            "prompt_tokens": prompt_tokens,
        }
        if not torch.cuda.is_available():
            options["attn_backend"] = "triton"
        sizes = {"max_batch_size": 4, "max_num_tokens": 24}
        llm = harness.llm(cuda_graph_config=graphs, kv_fill=float("nan"), **sizes, **options)
        return WatchedGraphs(llm, monkeypatch)

    return build


def params(num_tokens: int = NUM_TOKENS, **options) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, **options)


def test_prompts_in_graphs_give_the_oracles_text(graphed, target, prompts):
    """Prompts of up to 33 tokens, in chunks, with and without generations in their step."""
    watched = graphed()
    few = [prompts[i] for i in (6, 3, 5, 0, 2)]
    lengths = [NUM_TOKENS + i for i in range(len(few))]
    want = [target.greedy(p, length) for p, length in zip(few, lengths, strict=True)]
    assert watched.generate(few, [params(length) for length in lengths]) == want
    with_prompts = [shape for shape in watched.replayed if shape.chunk_lens]
    assert watched.captured.num_prompt_replays == len(with_prompts)
    assert any(shape.num_generations for shape in with_prompts)
    assert any(not shape.num_generations for shape in with_prompts)
    assert not watched.eager
    assert_drained(watched.llm)


def test_what_no_graph_holds_runs_eagerly(graphed, target, prompts):
    """Longer chunks, and prompts whose log-probabilities are requested."""
    watched = graphed(prompt_tokens=(8,))
    few = [prompts[5], prompts[0]]
    assert watched.generate(few, params()) == [target.greedy(p, NUM_TOKENS) for p in few]
    assert any(shape.num_ctx_tokens > 8 for shape in watched.eager)
    scored = watched.llm.generate([prompts[1]], params(2, prompt_logprobs=1))[0]
    assert scored.prompt_logprobs is not None
    assert not watched.replayed[-1].chunk_lens


def test_random_arrivals_and_options(graphed, harness, prompts):
    """Sampled and processed requests among greedy ones give what an eager executor gives."""
    options = [
        {},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 0.7, "top_p": 0.9, "seed": 2},
        {"temperature": 0.9, "top_k": 8, "repetition_penalty": 1.2, "seed": 3},
    ]
    few, wanted = prompts[:6], [params(**options[i % 4]) for i in range(6)]
    eager = harness.llm(max_batch_size=4, kv_fill=float("nan"))
    want = [output.token_ids for output in eager.generate(few, wanted)]
    watched = graphed()
    assert watched.generate(few, wanted) == want
    kinds = {shape.sampling_kind for shape in watched.replayed if shape.chunk_lens}
    assert SamplingKind.PROCESSED in kinds
    assert watched.generate(few[1:3], wanted[1:3]) == want[1:3]
    kinds = {shape.sampling_kind for shape in watched.replayed if shape.chunk_lens}
    assert kinds >= {SamplingKind.SAMPLED, SamplingKind.PROCESSED}
    assert_drained(watched.llm)


def test_padded_chunks():
    shape = StepShape((5, 1, 1), 2, 3)
    chunks = PromptChunks([7, 8, 9], [0, 1, 4], [-1, 5], [2, 1])
    padded = chunks.padded(shape, 1)
    assert padded == PromptChunks(
        ids=[7, 8, 9, 0, 0, 0, 0],
        positions=[0, 1, 4, 0, 0, 0, 0],
        next_prompt=[-1, 5, -1],
        lens=[2, 1, 4],
        order=[0, 1, 3, 2, 4],
    )
    assert padded.last_rows == [1, 2, 6]


def test_long_chunks_are_captured_with_more_batch_sizes():
    generations = [StepShape((), size, 3) for size in (48, 32, 16, 8, 4, 2, 1)]
    sizes: dict[int, list[int]] = {}
    for shape in prompt_shapes([8, 16], generations):
        if shape.sampling_kind is SamplingKind.GREEDY:
            sizes.setdefault(shape.num_ctx_tokens - CAPTURED_CHUNKS, []).append(
                shape.num_generations
            )
    assert sizes == {8: [0, 48, 16, 4], 16: [0, 48, 32, 16, 8, 4, 1]}


def test_fitting_shape():
    generations = [StepShape((), size, k) for size, k in ((16, 2), (16, 0), (2, 3), (1, 3))]
    shapes = prompt_shapes([8, 16], generations)
    assert len(set(shapes)) == len(shapes) == 3 * (3 + 4)
    for num_chunks in (1, 3, CAPTURED_CHUNKS - 1):
        for num_tokens in range(num_chunks, 30):
            step = StepShape((num_tokens - num_chunks + 1,) + (1,) * (num_chunks - 1), 0, 3)
            shape = fitting_shape(step, shapes)
            if num_tokens > 16 + num_chunks:
                assert shape is None
            else:
                assert shape is not None
                assert shape.num_generations == 0
                # each chunk takes the place of a padding chunk and its token
                size = 8 if num_tokens <= 8 + num_chunks else 16
                assert shape.num_ctx_tokens == size + CAPTURED_CHUNKS
    few = [shape for shape in distinct_shapes(shapes) if shape.sampling_kind == 0]
    assert {(shape.num_ctx_tokens, shape.num_generations) for shape in few} == {
        (16, 0),
        (24, 0),
        (16, 16),
        (24, 16),
    }
    assert distinct_shapes(generations) == generations
    # of other drafts, kinds, more generations or more chunks there is none
    assert fitting_shape(StepShape((4,), 3, 3), shapes) is None
    assert fitting_shape(StepShape((4,), 3, 2), shapes).num_generations == 16
    assert fitting_shape(StepShape((4,), 17, 2), shapes) is None
    assert fitting_shape(StepShape((1,) * (CAPTURED_CHUNKS + 1), 0, 3), shapes) is None
