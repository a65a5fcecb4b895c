"""Metadata fields of several API versions that attention backends read in every pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.config import SpeculativeDecodingMode
from mtp_plugin.speculative.drafting import MTPEagleWorker, MTPWorker
from mtp_plugin.speculative.drafting.attention_loop import draft_loop
from mtp_plugin.speculative.drafting.draft_layers import LAYER_ARGUMENTS
from tests.speculative.drafting.contract import snapshot
from tests.speculative.drafting.host import Prompt, ScriptedLayer, Step, Turn
from tests.speculative.plain_host import KVAttention, int32

K = 3
WIDTH = 4
EAGLE = SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL
PAIRS = [
    pytest.param(MTPEagleWorker, EAGLE, id="eagle"),
    pytest.param(MTPWorker, SpeculativeDecodingMode.MTP, id="vanilla"),
]


class LineAttention(KVAttention):
    """Buffers longer than the batch, views of its rows, and two tables of blocks.

    FlashMLA reads `block_ids_per_seq`: row i is the i-th generation's. The other table has a row
    per request of the batch.
    """

    enable_flash_mla = True
    has_spec_dec_saved_state = False

    def __init__(self, seq_lens: list[int], num_contexts: int, kv_lens: list[int]) -> None:
        super().__init__(seq_lens, num_contexts, kv_lens)
        rows, spare = len(seq_lens), 2
        self.kv_lens_cuda = int32([*kv_lens, *[99] * spare])
        self.kv_lens_cuda_runtime = self.kv_lens_cuda[:rows]
        self.kv_lens_runtime = int32(kv_lens)
        self.host_request_types = int32([*self.host_request_types.tolist(), *[0] * spare])
        self.host_request_types_runtime = self.host_request_types[:rows]
        for name in ("prompt_lens_cpu", "prompt_lens_cuda"):
            lens = int32([*seq_lens, *[77] * spare])
            setattr(self, name, lens)
            setattr(self, f"{name}_runtime", lens[:rows])
        blocks = 10 * torch.arange(rows, dtype=torch.int32).unsqueeze(1) + torch.arange(WIDTH)
        self.kv_block_ids_per_seq = torch.zeros(rows + spare, WIDTH, dtype=torch.int32)
        self.kv_block_ids_per_seq[:rows] = blocks
        self.block_ids_per_seq = torch.zeros_like(self.kv_block_ids_per_seq)
        self.block_ids_per_seq[: rows - num_contexts] = blocks[num_contexts:]
        self.use_spec_decoding = True

    def prepare_for_spec_dec(self, *names: str) -> None:
        raise AssertionError(f"a host would put {names} back itself")


class ReadingLayer(ScriptedLayer):
    """Notes what a backend reads of every request."""

    def __init__(self, depth: int = 0, seen: Any = None, read: Any = None) -> None:
        super().__init__(depth, seen)
        self.read = [] if read is None else read

    def __call__(self, *, attn_metadata: Any, **inputs: Any) -> torch.Tensor:
        attn = attn_metadata
        rows, contexts = attn.num_seqs, attn.num_contexts
        tables = [attn.kv_block_ids_per_seq[i] for i in range(contexts)]
        tables += [attn.block_ids_per_seq[i] for i in range(rows - contexts)]
        self.read.append(
            SimpleNamespace(
                first_blocks=[int(table[0]) for table in tables],
                kv_lens=attn.kv_lens_cuda_runtime.tolist(),
                rebound_kv_lens=attn.kv_lens_cuda[:rows].tolist(),
                types=attn.host_request_types_runtime.tolist(),
                prompt_lens=attn.prompt_lens_cuda_runtime.tolist(),
                host_prompt_lens=attn.prompt_lens_cpu_runtime.tolist(),
                seq_lens=attn.seq_lens_cuda.tolist(),
                contexts=contexts,
                use_spec_decoding=attn.use_spec_decoding,
            )
        )
        return super().__call__(attn_metadata=attn_metadata, **inputs)


def mixed(mode: SpeculativeDecodingMode, **options: Any) -> Step:
    """Two prompts, one of them its second chunk, and two generations."""
    options.setdefault("attention", LineAttention)
    return Step(
        K,
        [Prompt([3, 4, 5], choice=6), Prompt([6, 7, 8, 9, 10, 11], 4, choice=8)],
        [Turn([1, 2, 3], [10, 11, 12], [10, 11, 13, 14]), Turn([1, 2], [5, 6, 7], [9, 6, 7, 8])],
        mode=mode,
        **options,
    )


def run(kind: Any, step: Step, layers: list[Any]) -> dict[str, torch.Tensor]:
    return kind(SimpleNamespace(max_draft_len=K), device="cpu")(**step.inputs(), mtp_layers=layers)


@pytest.mark.parametrize("contexts", [0, 1, 2])
@pytest.mark.parametrize(("kind", "mode"), PAIRS)
def test_every_request_reads_its_own_blocks_in_every_pass(
    kind: Any, mode: SpeculativeDecodingMode, contexts: int
) -> None:
    """Rows stay in the batch's order when contexts become generations, and so must the table."""
    step = mixed(mode)
    step = Step(K, step.prompts[:contexts], step.turns, attention=LineAttention, mode=mode)
    before = snapshot(step.attn)
    read: list[Any] = []
    run(kind, step, [ReadingLayer(depth, read=read) for depth in range(K)])
    assert len(read) == K
    for seen in read:
        assert seen.first_blocks == [10 * request for request in range(contexts + 2)]
    assert [seen.contexts for seen in read] == (
        [contexts, 0, 0] if kind is MTPEagleWorker else [contexts] * K
    )
    assert snapshot(step.attn) == before


def test_contexts_stay_contexts_without_a_kv_cache() -> None:
    step = mixed(EAGLE)
    step.attn.kv_cache_manager = None
    before = snapshot(step.attn)
    read: list[Any] = []
    run(MTPEagleWorker, step, [ReadingLayer(depth, read=read) for depth in range(K)])
    assert [seen.contexts for seen in read] == [2] * K
    assert [seen.types for seen in read] == [[0, 0, 1, 1]] * K
    assert [seen.seq_lens for seen in read[1:]] == [[1] * 4] * (K - 1)
    assert snapshot(step.attn) == before


def test_vanilla_heads_may_have_three_parameters() -> None:
    class Head(ScriptedLayer):
        def shared_head(self, hidden: Any, lm_head: Any, attn_metadata: Any) -> torch.Tensor:
            return super().shared_head(hidden, lm_head, attn_metadata)

    step = mixed(SpeculativeDecodingMode.MTP)
    given = run(MTPWorker, step, [Head(depth) for depth in range(K)])
    other = mixed(SpeculativeDecodingMode.MTP)
    expected = run(MTPWorker, other, [ScriptedLayer(depth) for depth in range(K)])
    assert torch.equal(given["next_draft_tokens"], expected["next_draft_tokens"])


def test_a_host_without_flash_mla_has_no_table_to_change() -> None:
    step = mixed(EAGLE)
    step.attn.enable_flash_mla = False
    original = step.attn.block_ids_per_seq
    with draft_loop(step.attn) as loop:
        loop.feed_single_rows(int32([1, 1, 2, 1]), K)
        assert step.attn.block_ids_per_seq is original


def test_tables_come_back_when_a_layer_breaks() -> None:
    class Breaking(ReadingLayer):
        def __call__(self, **inputs: Any) -> torch.Tensor:
            result = super().__call__(**inputs)
            if len(self.read) == 2:
                raise RuntimeError("the layer broke")
            return result

    step, layer = mixed(EAGLE), Breaking()
    before = snapshot(step.attn)
    with pytest.raises(RuntimeError, match="the layer broke"):
        run(MTPEagleWorker, step, [layer])
    assert layer.read[-1].use_spec_decoding is False
    assert snapshot(step.attn) == before
    assert step.attn.has_spec_dec_saved_state is False


@pytest.mark.parametrize(("kind", "mode"), PAIRS)
def test_views_show_what_was_rebound(kind: Any, mode: SpeculativeDecodingMode) -> None:
    step = mixed(mode)
    read: list[Any] = []
    run(kind, step, [ReadingLayer(depth, read=read) for depth in range(K)])
    for seen in read:
        assert seen.kv_lens == seen.rebound_kv_lens
        assert seen.types == [0] * seen.contexts + [1] * (4 - seen.contexts)
    assert len({tuple(seen.kv_lens) for seen in read}) == (K if kind is MTPEagleWorker else 1)


def test_prompts_count_the_history_in_front_of_them() -> None:
    """Kernels take a context's query rows from `prompt_lens`; those of generations stay."""
    step = mixed(SpeculativeDecodingMode.MTP)
    read: list[Any] = []
    run(MTPWorker, step, [ReadingLayer(depth, read=read) for depth in range(K)])
    for seen in read:
        assert seen.seq_lens == [3, 2 + K, K + 1, K + 1]
        assert seen.prompt_lens == seen.host_prompt_lens == [3, 2 + K, K + 1, K + 1]
    assert step.attn.prompt_lens_cuda.tolist() == [3, 2, K + 1, K + 1, 77, 77]


def test_prompts_stay_without_look_ahead() -> None:
    step = mixed(SpeculativeDecodingMode.MTP, look_ahead=False)
    read: list[Any] = []
    run(MTPWorker, step, [ReadingLayer(depth, read=read) for depth in range(K)])
    assert [seen.prompt_lens for seen in read] == [[3, 2, K + 1, K + 1]] * K


@pytest.mark.parametrize("use_spec_decoding", [True, False])
@pytest.mark.parametrize(
    ("kind", "mode", "passes"),
    [
        pytest.param(MTPEagleWorker, EAGLE, [True, False, False], id="eagle"),
        pytest.param(MTPWorker, SpeculativeDecodingMode.MTP, [True] * K, id="vanilla"),
    ],
)
def test_kernels_of_several_query_rows_are_off_in_passes_of_one(
    kind: Any, mode: SpeculativeDecodingMode, passes: list[bool], use_spec_decoding: bool
) -> None:
    step = mixed(mode)
    step.attn.use_spec_decoding = use_spec_decoding
    read: list[Any] = []
    run(kind, step, [ReadingLayer(depth, read=read) for depth in range(K)])
    expected = [use_spec_decoding and each for each in passes]
    assert [seen.use_spec_decoding for seen in read] == expected
    assert step.attn.use_spec_decoding is use_spec_decoding


# --- hosts that do not say whether their backend reads cached tokens on the host ---


class Undeclared(KVAttention):
    reads_cached_token_counts = None


class HostOnly(Undeclared):
    """Lengths are only in the host's list, which its backend reads in every layer."""

    def __init__(self, seq_lens: list[int], num_contexts: int, kv_lens: list[int]) -> None:
        super().__init__(seq_lens, num_contexts, kv_lens)
        del self.kv_lens_cuda


class CountingLayer(ScriptedLayer):
    """Records the KV lengths of every pass by the host's list."""

    def __init__(self, depth: int, ends: list[list[int]]) -> None:
        super().__init__(depth)
        self.ends = ends

    def __call__(self, *, attn_metadata: Any, **inputs: Any) -> torch.Tensor:
        counts = attn_metadata.kv_cache_params.num_cached_tokens_per_seq
        self.ends.append((torch.tensor(counts) + attn_metadata._seq_lens).tolist())
        return super().__call__(attn_metadata=attn_metadata, **inputs)


@pytest.mark.parametrize(("kind", "mode"), PAIRS)
def test_host_list_follows_acceptance_without_device_lengths(
    kind: Any, mode: SpeculativeDecodingMode
) -> None:
    step = mixed(mode, attention=HostOnly)
    before = snapshot(step.attn)
    ends: list[list[int]] = []
    run(kind, step, [CountingLayer(depth, ends) for depth in range(K)])
    # prompts of 3 and 6; runs of 3 and 1 after 2 and 1 tokens, at least the rows that are fed
    if kind is MTPWorker:
        expected = [[3, 6, 5, K + 1]] * K
    else:
        expected = [[3, 6, 6, 5], [4, 7, 6, 3], [5, 8, 7, 4]]
    assert ends == expected
    assert snapshot(step.attn) == before


@pytest.mark.parametrize("kind", [Undeclared, HostOnly])
def test_host_list_stays_with_device_lengths_or_in_a_graph(kind: type) -> None:
    attn = kind([4], 0, [13])
    attn.is_cuda_graph = kind is HostOnly
    original = attn.kv_cache_params.num_cached_tokens_per_seq
    with draft_loop(attn) as loop:
        loop.feed_window(int32([1]), step_rows=4, window=4)
        assert attn.kv_cache_params.num_cached_tokens_per_seq is original


def test_a_host_without_a_cache_has_no_list() -> None:
    attn = HostOnly([4], 0, [13])
    attn.kv_cache_params.num_cached_tokens_per_seq = None
    with draft_loop(attn) as loop:
        loop.feed_window(int32([1]), step_rows=4, window=4)
    assert attn.kv_cache_params.num_cached_tokens_per_seq is None


# --- further arguments of layers ---


class Plain(torch.nn.Module):
    """A layer without further arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.scripted = ScriptedLayer()
        self.extra: list[dict[str, Any]] = []

    def run(self, inputs: dict[str, Any], **extra: Any) -> torch.Tensor:
        self.extra.append(extra)
        return self.scripted(**inputs)

    def forward(
        self, *, embed_tokens, input_ids, position_ids, hidden_states, attn_metadata
    ) -> torch.Tensor:
        names = "embed_tokens", "input_ids", "position_ids", "hidden_states", "attn_metadata"
        values = embed_tokens, input_ids, position_ids, hidden_states, attn_metadata
        return self.run(dict(zip(names, values, strict=True)))

    def shared_head(self, *given: Any) -> torch.Tensor:
        return self.scripted.shared_head(*given)


class ReadsMetadata(Plain):
    def forward(
        self,
        embed_tokens,
        input_ids,
        position_ids,
        hidden_states,
        attn_metadata,
        spec_metadata,
        all_rank_num_tokens,
    ) -> torch.Tensor:
        names = "embed_tokens", "input_ids", "position_ids", "hidden_states", "attn_metadata"
        values = embed_tokens, input_ids, position_ids, hidden_states, attn_metadata
        extra = {"spec_metadata": spec_metadata, "all_rank_num_tokens": all_rank_num_tokens}
        return self.run(dict(zip(names, values, strict=True)), **extra)


class ForwardsKwargs(Plain):
    """DeepSeek's of 2025: what it does not name goes to attention, which takes nothing more."""

    def forward(self, *, all_rank_num_tokens=None, **inputs: Any) -> torch.Tensor:
        extra = {"all_rank_num_tokens": all_rank_num_tokens}
        if "spec_metadata" in inputs:
            extra["spec_metadata"] = inputs.pop("spec_metadata")
        return self.run(inputs, **extra)


class Wrapper(Plain):
    """Hides the arguments that the wrapped layer requires."""

    def __init__(self) -> None:
        super().__init__()
        self.wrapped = ReadsMetadata()
        self.extra = self.wrapped.extra

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.wrapped(*args, **kwargs)


@pytest.mark.parametrize("kind", [MTPEagleWorker, MTPWorker])
@pytest.mark.parametrize(
    ("layer", "layer_kwargs", "names"),
    [
        (Plain, ["spec_metadata"], []),
        (ReadsMetadata, [], ["all_rank_num_tokens", "spec_metadata"]),
        (ForwardsKwargs, [], ["all_rank_num_tokens"]),
        (Wrapper, LAYER_ARGUMENTS, ["all_rank_num_tokens", "spec_metadata"]),
        (ForwardsKwargs, ["spec_metadata"], ["all_rank_num_tokens", "spec_metadata"]),
    ],
)
def test_layers_get_the_arguments_that_they_name(
    kind: Any, layer: Any, layer_kwargs: list[str], names: list[str]
) -> None:
    """The host's metadata, and of ranks that exchange nothing None; through ``**kwargs`` only what
    the host's own worker passes."""
    step = Step(2, [Prompt([3, 4, 5])])
    layers = [layer() for _ in range(2)]
    config = SimpleNamespace(max_draft_len=2, mtp=None)
    worker = kind(config, device="cpu", layer_kwargs=layer_kwargs)
    worker(**step.inputs(), mtp_layers=layers)
    calls = [extra for each in layers for extra in each.extra]
    assert len(calls) == 2
    for extra in calls:
        assert sorted(extra) == names
        assert extra.get("spec_metadata", step.spec) is step.spec
        assert extra.get("all_rank_num_tokens") is None
