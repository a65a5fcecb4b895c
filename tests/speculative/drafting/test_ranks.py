"""Workers of several ranks: which are served, split draft heads, rows that ranks exchange."""

from __future__ import annotations

import re
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mtp_plugin.errors import ConfigError, MetadataError, TensorContractError
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.step import SamplingKind
from mtp_plugin.speculative.drafting import MTPEagleWorker, MTPWorker
from tests.speculative.drafting.host import Prompt, ScriptedLayer, Step, Turn
from tests.speculative.drafting.test_draft_len_of_a_step import widen
from tests.speculative.drafting.test_kernels import Case, MixingLayer
from tests.speculative.plain_host import KVAttention

K = 3
WORKERS = [MTPEagleWorker, MTPWorker]


def mapping(**sizes: Any) -> SimpleNamespace:
    """As TensorRT-LLM's: sizes, this rank's places, how requests are shared."""
    given: dict[str, Any] = {"tp_size": 1, "pp_size": 1, "cp_size": 1, "tp_rank": 0} | sizes
    given.setdefault("world_size", given["tp_size"] * given["pp_size"] * given["cp_size"])
    given.setdefault("pp_rank", given["pp_size"] - 1)
    given.setdefault("enable_attention_dp", False)
    return SimpleNamespace(**given)


def twice(logits: torch.Tensor) -> torch.Tensor:
    return torch.cat([logits, logits], dim=1)


def make(kind: Any, **options: Any) -> Any:
    mtp = options.pop("mtp", None)
    return kind(SimpleNamespace(max_draft_len=K, mtp=mtp), device="cpu", **options)


# --- which ranks are served ---


@pytest.mark.parametrize("kind", WORKERS)
@pytest.mark.parametrize(
    "options",
    [
        {"mapping": mapping(tp_size=2), "gather_logits": twice},
        {"mapping": mapping(tp_size=2, enable_attention_dp=True)},
        {"mapping": mapping(tp_size=2, enable_attention_dp=True), "gather_logits": twice},
        {"mapping": mapping(tp_size=1), "gather_logits": twice},
        {"gather_logits": twice},
    ],
)
def test_ranks_that_are_served(kind: Any, options: dict[str, Any]) -> None:
    assert make(kind, **options).max_draft_len == K


@pytest.mark.parametrize("kind", WORKERS)
def test_a_stage_that_is_not_the_last_is_skipped(kind: Any) -> None:
    """It has neither logits nor draft layers: a step there is refused by name."""
    worker = make(kind, mapping=mapping(pp_size=2, pp_rank=0))
    step = Step(K, [Prompt([3, 4, 5])])
    outputs = worker.skip_forward(**step.inputs() | {"logits": None}, draft_model=None)
    assert outputs["next_draft_tokens"].shape == (1, K)
    for call in (worker, worker.skip_drafting):
        with pytest.raises(
            ConfigError, match="stage other than the last runs no step; call skip_forward"
        ):
            call(**step.inputs())


# --- a draft head that is split over the vocabulary ---


class SplitLayer(MixingLayer):
    """Its head is this rank's columns; those past the vocabulary must never be sampled."""

    rank, ranks = 0, 2

    def shared_head(self, *given: Any, **options: Any) -> torch.Tensor:
        whole = super().shared_head(*given, **options)
        columns = -(-whole.shape[1] // self.ranks)
        padding = whole.new_full((len(whole), columns * self.ranks - whole.shape[1]), 1e9)
        first = self.rank * columns
        return torch.cat([whole, padding], dim=1)[:, first : first + columns].contiguous()


def case_of(*, vanilla: bool, draws: bool) -> Case:
    case = Case(
        k=K,
        chunks=[(0, 4, True), (2, 5, True)],
        num_generations=3,
        vocab=131,
        hidden=8,
        seed=11,
        vanilla=vanilla,
    )
    case.spec.sampling_kind = SamplingKind.PROCESSED if draws else SamplingKind.GREEDY
    if draws:
        case.manager.table.column("temperature")[:] = 1.5
        case.manager.table.column("seed")[:] = 77
    return case


def step_of(case: Case, worker: Any, layers: list[Any]) -> dict[str, torch.Tensor]:
    return worker(
        **case.inputs,
        attn_metadata=case.attention,
        spec_metadata=case.spec,
        mtp_layers=layers,
    )


def run_rank(rank: int, port: int) -> None:
    """Drafts of a split head, on every rank those of the whole one."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)

    def gather(logits: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(logits, device="cpu") for _ in range(2)]
        dist.all_gather(parts, logits.cpu())
        return torch.cat(parts, dim=1).to(logits.device)

    try:
        drafts = set()
        for vanilla, draws in ((False, False), (False, True), (True, False), (True, True)):
            case, same = (case_of(vanilla=vanilla, draws=draws) for _ in range(2))
            kind = MTPWorker if vanilla else MTPEagleWorker
            expected = step_of(case, kind(case.config), case.layers)
            worker = kind(
                same.config, mapping=mapping(tp_size=2, tp_rank=rank), gather_logits=gather
            )
            layers = [SplitLayer(*vars(layer).values()) for layer in same.layers]
            for layer in layers:
                layer.rank = rank
            outputs = step_of(same, worker, layers)
            for name, value in expected.items():
                assert torch.equal(outputs[name], value), (name, vanilla, draws)
            drafts.add(tuple(expected["next_draft_tokens"].flatten().tolist()))
        assert len(drafts) == 4
    finally:
        dist.destroy_process_group()


def test_two_ranks_draft_what_one_drafts() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run_rank, args=(port,), nprocs=2)


def both(layer: SplitLayer) -> Any:
    """What two ranks give, put together in one process."""

    def gather(_: torch.Tensor) -> torch.Tensor:
        parts = []
        for rank in range(2):
            layer.rank = rank
            parts.append(layer.last(layer.given))
        layer.rank = 0
        return torch.cat(parts, dim=1)

    return gather


class KeepingLayer(SplitLayer):
    """Remembers what its head was called with."""

    def shared_head(self, *given: Any, **options: Any) -> torch.Tensor:
        self.given = given
        return super().shared_head(*given, **options)

    def last(self, given: Any) -> torch.Tensor:
        return super().shared_head(*given)


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("draws", [False, True])
def test_a_head_put_together_drafts_as_a_whole_one(backend: Backend, draws: bool) -> None:
    """Padding columns are never sampled, on any backend."""
    case, same = (case_of(vanilla=False, draws=draws) for _ in range(2))
    plain = MTPEagleWorker(case.config)
    layer = KeepingLayer(*vars(same.layers[0]).values())
    worker = MTPEagleWorker(same.config, mapping=mapping(tp_size=2), gather_logits=both(layer))
    plain.backend = worker.backend = backend
    expected, outputs = step_of(case, plain, case.layers), step_of(same, worker, [layer])
    for name, value in expected.items():
        assert torch.equal(outputs[name], value), name


def test_a_cut_vocabulary_is_gathered_too() -> None:
    case, same = (case_of(vanilla=False, draws=False) for _ in range(2))
    ids = torch.arange(0, 131, 3, dtype=torch.int32)

    class Cut(MixingLayer):
        def shared_head(self, *given: Any) -> torch.Tensor:
            return super().shared_head(*given)[:, ids.long()]

    class Half(Cut):
        def shared_head(self, *given: Any) -> torch.Tensor:
            self.whole = super().shared_head(*given)
            return self.whole[:, : len(ids) // 2]

    halves = Half(*vars(same.layers[0]).values())
    worker = MTPEagleWorker(
        same.config,
        mapping=mapping(tp_size=2),
        draft_vocab_ids=ids,
        gather_logits=lambda _: halves.whole,
    )
    expected = step_of(
        case,
        MTPEagleWorker(case.config, draft_vocab_ids=ids),
        [Cut(*vars(case.layers[0]).values())],
    )
    outputs = step_of(same, worker, [halves])
    assert torch.equal(outputs["next_draft_tokens"], expected["next_draft_tokens"])


def test_a_head_that_gathers_by_itself_is_left_alone() -> None:
    def never(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("gathered twice")

    case = case_of(vanilla=False, draws=False)
    worker = MTPEagleWorker(case.config, mapping=mapping(tp_size=2), gather_logits=never)
    step_of(case, worker, case.layers)


def test_a_rank_with_requests_of_its_own_has_a_head_of_its_own() -> None:
    def never(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("heads are local")

    case = case_of(vanilla=False, draws=False)
    ranks = mapping(tp_size=2, enable_attention_dp=True)
    worker = MTPEagleWorker(case.config, mapping=ranks, gather_logits=never)
    layers = [SplitLayer(*vars(layer).values()) for layer in case.layers]
    step_of(case, worker, layers)


def test_ranks_that_give_too_few_columns() -> None:
    case = case_of(vanilla=False, draws=False)
    worker = MTPEagleWorker(
        case.config, mapping=mapping(tp_size=2), gather_logits=lambda logits: logits
    )
    layers = [SplitLayer(*vars(layer).values()) for layer in case.layers]
    message = "gather_logits: expected [5, 131] of columns [5, 66] of each rank, got [5, 66]"
    with pytest.raises(TensorContractError, match=re.escape(message)):
        step_of(case, worker, layers)


@pytest.mark.parametrize("kind", WORKERS)
def test_the_public_step_gathers(kind: Any) -> None:
    shards = torch.tensor([[0.0, 1.0], [5.0, 0.0]])
    worker = make(
        kind,
        mapping=mapping(tp_size=2),
        gather_logits=lambda logits: torch.cat([logits, logits + 1.0], dim=1),
    )
    assert worker.draft_sampler(shards).tolist() == [3, 2]


# --- rows that ranks exchange ---

ADP = mapping(tp_size=3, tp_rank=1, enable_attention_dp=True)


def exchanging(
    k: int = K, *, look_ahead: bool = False, attention: Any = KVAttention, **counts: Any
) -> Step:
    """Rank 1 of 3: a second chunk of two rows and two generations."""
    turn = Turn([1, 2, 3], [10, 11, 12][:k], [10, 11, 13, 14][: k + 1])
    prompts = [Prompt([6, 7, 8, 9, 10, 11], 4, choice=8)]
    step = Step(k, prompts, [turn, turn], attention=attention, look_ahead=look_ahead)
    step.spec.all_rank_num_seqs = counts.pop("seqs", None)
    step.attn.all_rank_num_tokens = counts.pop("target", None)
    for name, value in counts.items():
        setattr(step.spec, name, value)
    return step


def extra_arguments(kind: Any, step: Step, **mtp: Any) -> list[Any]:
    seen: list[Any] = []
    worker = make(kind, mapping=ADP, mtp=SimpleNamespace(**mtp))
    worker(**step.inputs(), mtp_layers=[ScriptedLayer(depth, seen) for depth in range(K)])
    assert sum(seen[0].seq_lens) == seen[0].extra["all_rank_num_tokens"][1]
    return [call.extra for call in seen]


# rank 0: a prompt of seven; rank 1: two rows and two generations; rank 2: one generation
TARGET = [7, 2 + 2 * (K + 1), K + 1]
IN_TREE = [7, 2 + 2 * K, K]


def test_windows_of_as_many_rows_as_the_target_are_counted_as_the_target() -> None:
    """Hosts count K rows of each generation, which our windows have not."""
    step = exchanging(all_rank_num_tokens=IN_TREE, target=TARGET, all_rank_max_num_tokens=9)
    extra = extra_arguments(MTPWorker, step)
    assert extra == [{"all_rank_num_tokens": TARGET, "all_rank_max_num_tokens": 10}] * K


@pytest.mark.parametrize("target", [TARGET, None])
def test_windows_of_tensorrt_llm_are_counted_by_the_host(target: Any) -> None:
    step = exchanging(all_rank_num_tokens=IN_TREE, target=target)
    extra = extra_arguments(MTPWorker, step, draft_window="trtllm")
    assert extra == [{"all_rank_num_tokens": IN_TREE}] * K


@pytest.mark.parametrize("generations", [[0, 2, 1], None])
@pytest.mark.parametrize(("window", "rows"), [("exact", K + 1), ("trtllm", K)])
def test_windows_of_a_shorter_step_keep_their_rows(
    generations: Any, window: str, rows: int
) -> None:
    """One draft of three: the target reads two rows of each generation."""
    step = exchanging(
        1,
        all_rank_num_tokens=[7, 2 + 2, 1],
        target=[7, 2 + 4, 2],
        all_rank_num_gens=generations,
        runtime_draft_len=1,
    )
    widen(step)
    extra = extra_arguments(MTPWorker, step, draft_window=window)
    assert extra[0] == {"all_rank_num_tokens": [7, 2 + 2 * rows, rows]}


def test_no_rank_is_fed_history_that_the_others_do_not_count() -> None:
    step = exchanging(look_ahead=True, all_rank_num_tokens=IN_TREE, target=TARGET)
    assert extra_arguments(MTPWorker, step)[0] == {"all_rank_num_tokens": TARGET}


def test_a_reused_layer_counts_the_target_and_then_sequences() -> None:
    """Also where the host keeps the later counts under the sequences alone."""
    step = exchanging(all_rank_num_tokens=TARGET, target=TARGET, seqs=[1, 3, 1])
    assert step.spec.subseq_all_rank_num_tokens is None
    extra = extra_arguments(MTPEagleWorker, step)
    later = {"all_rank_num_tokens": [1, 3, 1]}
    assert extra == [{"all_rank_num_tokens": TARGET}, later, later]


@pytest.mark.parametrize(
    ("kind", "counts", "message"),
    [
        (MTPWorker, {"all_rank_num_tokens": IN_TREE}, "[7, 8, 3] of the speculative metadata"),
        (MTPWorker, {"all_rank_num_tokens": IN_TREE, "target": [7, 9, 4]}, "[7, 9, 4] of the att"),
        (MTPWorker, {"all_rank_num_tokens": [10], "target": [10]}, "rank 1 drafts with 10 rows"),
        (MTPEagleWorker, {"all_rank_num_tokens": IN_TREE}, "and None of the attention metadata"),
    ],
)
def test_counts_that_cannot_be_right_are_refused(kind: Any, counts: dict, message: str) -> None:
    step = exchanging(**counts)
    worker = make(kind, mapping=ADP)
    with pytest.raises(MetadataError, match=f"all_rank_num_tokens: .*{re.escape(message)}"):
        worker(**step.inputs(), mtp_layers=[ScriptedLayer(depth) for depth in range(K)])


@pytest.mark.parametrize("kind", WORKERS)
def test_layers_get_no_counts_if_ranks_exchange_nothing(kind: Any) -> None:
    step = exchanging()
    seen: list[Any] = []
    layers = [ScriptedLayer(depth, seen) for depth in range(K)]
    make(kind, mapping=ADP)(**step.inputs(), mtp_layers=layers)
    assert [call.extra for call in seen] == [{}] * K


class MetadataReader(ScriptedLayer):
    """Notes what the attention metadata says of ranks."""

    def __call__(self, *, attn_metadata: Any, **inputs: Any) -> torch.Tensor:
        self.seen.append(attn_metadata.all_rank_num_tokens)
        return ScriptedLayer(self.depth)(attn_metadata=attn_metadata, **inputs)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(MTPEagleWorker, [TARGET, [1, 3, 1], [1, 3, 1]]), (MTPWorker, [TARGET] * K)],
)
def test_the_attention_metadata_says_what_ranks_feed(kind: Any, expected: list[Any]) -> None:
    """In every pass; after the last one the field is that of the target."""
    step = exchanging(all_rank_num_tokens=TARGET, target=TARGET, seqs=[1, 3, 1])
    if kind is MTPWorker:
        step = exchanging(all_rank_num_tokens=IN_TREE, target=TARGET, seqs=[1, 3, 1])
    before, seen = step.attn.all_rank_num_tokens, []
    layers = [MetadataReader(depth, seen) for depth in range(K)]
    make(kind, mapping=ADP)(**step.inputs(), mtp_layers=layers)
    assert seen == expected
    assert step.attn.all_rank_num_tokens is before


def test_the_attention_metadata_says_what_windows_of_tensorrt_llm_have() -> None:
    step, seen = exchanging(all_rank_num_tokens=IN_TREE, target=TARGET), []
    worker = make(MTPWorker, mapping=ADP, mtp=SimpleNamespace(draft_window="trtllm"))
    worker(**step.inputs(), mtp_layers=[MetadataReader(depth, seen) for depth in range(K)])
    assert seen == [IN_TREE] * K


@pytest.mark.parametrize("kind", WORKERS)
def test_the_attention_metadata_of_a_rank_alone_stays_as_it_is(kind: Any) -> None:
    step, seen = exchanging(all_rank_num_tokens=[10], target=[77]), []
    make(kind)(**step.inputs(), mtp_layers=[MetadataReader(depth, seen) for depth in range(K)])
    assert seen == [[77]] * K
