"""A small scheduler over SGLang's own requests, slots, sampler, verification and draft methods.

The target's logits depend on the last token alone, and so do those of the draft model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import socket
import sys
from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock

import sglang.srt.distributed.parallel_state as parallel
import sglang.srt.layers.logprob_processor as logprobs
import sglang.srt.managers.scheduler_components.batch_result_processor as results
import sglang.srt.speculative.eagle_worker_common as worker_common
import sglang.srt.speculative.eagle_worker_v2 as worker_v2
import torch
from sglang.srt import runtime_context
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import create_sampler
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.logprob_result_processor import (
    SchedulerLogprobResultProcessor,
)
from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from mtp_plugin.hosts.sglang import hooks
from mtp_plugin.hosts.sglang.engine import Engine
from mtp_plugin.hosts.sglang.options import SglangOptions
from mtp_plugin.hosts.sglang.requests import slot_of
from mtp_plugin.speculative.rows.options import EngineSettings

VOCAB = 40
EOS = 7
K = 3


class Tokenizer:
    """What SGLang reads of a tokenizer."""

    eos_token_id = EOS
    bos_token_id = None
    additional_stop_token_ids = None

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) - 65 for letter in text]

    def decode(self, ids: Any, **_: Any) -> str:
        """One letter per id."""
        return "".join(chr(65 + token) for token in ids)


def prepare(rank: int = 0, ranks: int = 1, dp_ranks: int = 1, port: int | None = None) -> None:
    """Publish SGLang's configuration and start its process groups, once a process.

    Args:
        ranks: of tensor parallelism, with ``dp_ranks`` of DP attention.
    """
    if parallel._TP is not None:
        return
    arguments = ServerArgs(
        model_path="dummy",
        device="cpu",
        sampling_backend="pytorch",
        speculative_algorithm="EAGLE",
        speculative_num_steps=K,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=K + 1,
        tp_size=ranks,
        dp_size=dp_ranks,
        enable_dp_attention=dp_ranks > 1,
    )
    given, sizes = {}, {}
    if hasattr(runtime_context, "SpawnRanks"):  # 0.5.23
        given["ranks"] = runtime_context.SpawnRanks(world_rank=rank)
    else:
        sizes["tensor_model_parallel_size"] = ranks
        sizes["attention_data_parallel_size"] = dp_ranks
    runtime_context.publish(arguments, role="scheduler", **given)
    runtime_context.get_flags().dp.enabled = dp_ranks > 1
    parallel.set_custom_all_reduce(False)
    parallel.init_distributed_environment(
        world_size=ranks,
        rank=rank,
        local_rank=rank,
        distributed_init_method=f"tcp://127.0.0.1:{port or free_port()}",
        backend="gloo",
        timeout=20,
    )
    parallel.initialize_model_parallel(backend="gloo", **sizes)
    hooks.install(hooks.SCHEDULER)
    hooks.install(hooks.DRAFTS)
    hooks.install(hooks.SPLIT)


def free_port() -> int:
    """Return a port that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def make_request(
    rid: str, prompt: list[int], *, num_logprobs: int = 0, wanted: Any = None, **options: Any
) -> Req:
    """Return a ``Req`` as SGLang's scheduler makes it, which goes on until it is stopped.

    Args:
        wanted: further arguments of ``Req``.
    """
    wanted = dict(wanted or {})
    if num_logprobs:
        ids = list(range(num_logprobs))
        wanted |= {"return_logprob": True, "top_logprobs_num": num_logprobs}
        wanted["token_ids_logprob"] = ids
    params = SamplingParams(**{"ignore_eos": True, "max_new_tokens": 1 << 20, **options})
    params.normalize(Tokenizer())
    params.verify(VOCAB)
    req = Req(rid, "", array("q", prompt), params, vocab_size=VOCAB, eos_token_ids={EOS}, **wanted)
    req.tokenizer = Tokenizer()
    return req


class Batch:
    """What SGLang reads of a ``ScheduleBatch``."""

    device = "cpu"
    forward_mode: ForwardMode
    spec_info: Any = None
    seq_lens_cpu = decoding_reqs = prefill_stats = dp_cooperation_info = None
    mamba_track_mask_cpu = None
    return_hidden_states = False
    return_hidden_states_mode = CaptureHiddenMode.NULL
    launch_ts = 0.0

    def __init__(self, reqs: list[Req]) -> None:
        self.reqs = reqs
        self.req_pool_indices_cpu = torch.tensor([slot_of(req) for req in reqs])
        self.req_pool_indices = self.req_pool_indices_cpu.clone()
        self.sampling_info = SamplingBatchInfo.from_schedule_batch(self, VOCAB)
        self.return_logprob = any(req.return_logprob for req in reqs)
        self.top_logprobs_nums = [req.logprob.top_logprobs_num for req in reqs]
        self.token_ids_logprobs = [req.logprob.token_ids_logprob for req in reqs]
        self.has_grammar = any(req.grammar for req in reqs)
        if self.has_grammar:
            self.sampling_info.grammars = [req.grammar for req in reqs]
            self.sampling_info.update_regex_vocab_mask()

    def batch_size(self) -> int:
        return len(self.reqs)

    def is_dllm(self) -> bool:
        return False


class Reporter(SchedulerMetricsReporter):
    """SGLang's counts of drafts, without the rest of its metrics."""

    def __init__(self) -> None:
        self.num_generated_tokens = self.forward_ct_decode = 0
        self.spec_num_accept_tokens = self.spec_num_forward_ct = 0
        self.spec_num_block_accept_tokens = self.spec_num_cap_tokens = 0
        self.spec_num_correct_drafts = 0
        self.scheduler = SimpleNamespace(enable_fpm=False)

    def report_prefill_stats(self, *_: Any, **__: Any) -> None:
        pass

    def report_decode_stats(self, *_: Any, **__: Any) -> None:
        pass


def result_processor(reporter: Reporter) -> results.SchedulerBatchResultProcessor:
    """Return what SGLang processes results of steps with, without its other parts."""
    names = [one.name for one in dataclasses.fields(results.SchedulerBatchResultProcessor)]
    parts = {name: MagicMock(name=name) for name in names}
    parts |= {"metrics_reporter": reporter, "enable_overlap": False, "enable_overlap_mlx": False}
    thinking = SimpleNamespace(think_end_ids=None, self_opened_think_start_ids=None)
    parts |= {"is_generation": True, "model_config": thinking}
    sizes = SimpleNamespace(vocab_size=VOCAB)
    parts["logprob_result_processor"] = SchedulerLogprobResultProcessor(model_config=sizes)
    return results.SchedulerBatchResultProcessor(**parts)


class DraftRunner(ModelRunner):
    """A draft model whose logits depend on the input tokens alone."""

    def __init__(self, table: torch.Tensor, columns: torch.Tensor | None) -> None:
        self.table = table if columns is None else table[:, columns]
        self.canary_manager = self.spec_algorithm = None
        self.msprobe_debugger = self.eplb_manager = None
        self.is_draft_worker, self.enable_elastic_ep, self.forward_pass_id = True, False, 0
        hf_config = SimpleNamespace(architectures=["X"])
        self.model_config = SimpleNamespace(hf_config=hf_config, model_is_mrope=False)

    def _forward_raw(self, forward_batch: Any, *_: Any) -> Any:
        logits = self.table[forward_batch.input_ids].clone()
        output = SimpleNamespace(
            next_token_logits=logits, hidden_states=torch.zeros(len(logits), 2)
        )
        return SimpleNamespace(logits_output=output)


def draft_step(tokens: torch.Tensor, **fields: Any) -> Any:
    """Return what SGLang reads of a ``ForwardBatch``, for a forward of the draft model."""
    return SimpleNamespace(
        extend_start_loc=None,
        extend_seq_lens=(),
        input_ids=tokens,
        batch_size=len(tokens),
        moe_num_token_non_padded=None,
        num_token_non_padded=None,
        forward_mode=ForwardMode.DECODE,
        apply_deprecated_skip_attn_backend_init=lambda _: None,
        **{"spec_info": None, **fields},
    )


@dataclass
class Counts:
    """Steps that verified drafts, and tokens that they gave."""

    steps: int = 0
    tokens: int = 0
    retractions: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens per request and step."""
        return self.tokens / max(self.steps, 1)


@dataclass
class ToyEngine:
    """Serves requests, with or without drafts."""

    draft_worker: ClassVar[Any] = worker_v2.EagleDraftWorker
    patches: ClassVar[dict[str, Any]] = {"_eagle_prefill_tail_tokens": lambda _, tokens: tokens}
    """Functions of its module that are replaced while it makes drafts."""
    num_drafts: int
    options: SglangOptions = field(default_factory=SglangOptions)
    slots: int = 6
    seed: int = 0
    token_map: torch.Tensor | None = None
    grammar_mask: Any = None
    chunk: int | None = None  # prompts that are longer come in two parts
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        prepare()
        generator = torch.Generator().manual_seed(3)
        self.table = torch.randn(VOCAB, VOCAB, generator=generator) * 2
        drafts = self.table + torch.randn(VOCAB, VOCAB, generator=generator) * 0.7
        settings = EngineSettings(self.options, self.num_drafts, drafter="eagle")
        self.engine = Engine(settings)
        self.engine.seed_from(self.seed)
        self.pool = ReqToTokenPool(self.slots, 64, "cpu", False)
        model_config = SimpleNamespace(vocab_size=VOCAB)
        self.runner = SimpleNamespace(
            req_to_token_pool=self.pool,
            model_config=model_config,
            sampling_observer=None,
            watermark_state=None,
            sampler=create_sampler(),
            ngram_embedding_manager=SimpleNamespace(update_after_decode=lambda **_: None),
        )
        self.runner._preprocess_logits = lambda *args: ModelRunner._preprocess_logits(
            self.runner, *args
        )
        self.engine.attach(self.runner)
        self.engine.count_drafts(None, is_first_rank=True)
        self.scheduler = MagicMock(enable_fpm=False, disaggregation_mode=None)
        self.scheduler._set_or_validate_priority.return_value = False  # the queue is this class's
        self.reporter = Reporter()
        self.scheduler.batch_result_processor = result_processor(self.reporter)
        self.worker = SimpleNamespace(
            topk=1,
            speculative_num_steps=self.num_drafts,
            speculative_num_draft_tokens=self.num_drafts + 1,
            speculative_algorithm=SimpleNamespace(is_standalone=lambda: False),
            hot_token_id=self.token_map,
            index_share_for_mtp_iteration=False,
            seed_dsa_topk_from_draft_extend=False,
            cuda_graph_runner_for_draft_extend=None,
            plan_stream=None,
            plan_stream_ctx=contextlib.nullcontext(),
            device="cpu",
            _topk1_parents_prealloc=torch.zeros(64, 0, dtype=torch.long),
            _topk1_score_indices_prealloc=torch.zeros(64, self.num_drafts, dtype=torch.long),
            draft_runner=DraftRunner(drafts, self.token_map),
            draft_attn_backend=SimpleNamespace(attn_backends=[None] * self.num_drafts),
        )
        if self.num_drafts:
            self.engine.drafts_from(self.worker)

    def admit(self, req: Req) -> None:
        """Pass SGLang's queue."""
        hooks._engine = self.engine
        Scheduler._add_request_to_queue(self.scheduler, req)

    def serve(self, reqs: list[Req], *, tokens: int, retract: float = 0.0) -> list[list[int]]:
        """Return the output of every request, without the tokens after ``max_new_tokens``."""
        hooks._engine = self.engine
        chosen = random.Random(5)
        for req in reqs:
            self.admit(req)
        waiting, running = list(reqs), []
        drafts: dict[str, EagleDraftInput] = {}
        while waiting or running:
            free = self.slots - len(running)
            new, waiting = waiting[:free], waiting[free:]
            if new:
                self._prefill(new, drafts)
                running += new
            step = chosen.sample(running, chosen.randint(1, len(running)))  # any batch, any order
            self._drafted_step(step, drafts) if self.num_drafts else self._step(step)
            for req in list(running):
                if len(req.output_ids) >= tokens or req.finished():
                    running.remove(req)
                    self._free(req)
                elif chosen.random() < retract:
                    running.remove(req)
                    self._free(req)
                    req.reset_for_retract()
                    waiting.append(req)
                    self.counts.retractions += 1
        return [list(req.output_ids[:tokens]) for req in reqs]

    def _free(self, req: Req) -> None:
        self.pool.free(req)

    def sample(
        self, batch: Batch, logits: torch.Tensor, lens: torch.Tensor, mode: ForwardMode, **more: Any
    ) -> tuple[torch.Tensor, Any]:
        """Return the tokens after rows of logits, and SGLang's output with log-probabilities."""
        step = SimpleNamespace(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=lens,
            positions=lens - 1 if mode.is_decode() else None,  # else of all tokens of prompts
            forward_mode=mode,
            sampling_info=batch.sampling_info,
            rids=[req.rid for req in batch.reqs],
            **{
                "return_logprob": False,
                "top_logprobs_nums": None,
                "token_ids_logprobs": None,
                **more,
            },
        )
        output = LogitsProcessorOutput(logits.clone(), hidden_states=_hidden(lens - 1))
        hooks._engine = self.engine
        return ModelRunner.sample(self.runner, output, step), output

    def _sample(
        self, batch: Batch, last: torch.Tensor, mode: ForwardMode, lens: list[int] | None = None
    ) -> torch.Tensor:
        whole = [len(req.origin_input_ids) + len(req.output_ids) for req in batch.reqs]
        lens = torch.tensor(lens or whole)
        wanted = {}
        if batch.return_logprob:
            wanted = {
                "return_logprob": True,
                "top_logprobs_nums": batch.top_logprobs_nums,
                "token_ids_logprobs": batch.token_ids_logprobs,
            }
        tokens, output = self.sample(batch, self.table[last], lens, mode, **wanted)
        batch.forward_mode = mode
        result = GenerationBatchResult(logits_output=output, next_token_ids=tokens)
        # no log-probabilities of prompts
        result.extend_input_len_per_req = [0] * len(batch.reqs)
        result.extend_logprob_start_len_per_req = [0] * len(batch.reqs)
        self._process(batch, result)
        return tokens.to(torch.int64)

    def _process(self, batch: Batch, result: GenerationBatchResult) -> None:
        """Add the tokens of a step to its requests, as SGLang's scheduler does."""
        algorithm = SpeculativeAlgorithm.EAGLE if result.accept_lens is not None else None
        batch.spec_algorithm = algorithm or SpeculativeAlgorithm.NONE
        for req in batch.reqs:
            req.is_retracted = False
        with _patched(results, release_kv_cache=lambda *_, **__: None):
            Scheduler.process_batch_result(self.scheduler, batch, result)

    def _prefill(self, reqs: list[Req], drafts: dict[str, EagleDraftInput]) -> None:
        self.pool.alloc(reqs)
        long = [req for req in reqs if self.chunk and len(req.origin_input_ids) > self.chunk]
        for req in long:
            req.inflight_middle_chunks = 1
            last = torch.tensor([req.origin_input_ids[self.chunk - 1]])
            self._sample(Batch([req]), last, ForwardMode.EXTEND, [self.chunk])
        batch = Batch(reqs)
        batch.forward_mode = ForwardMode.EXTEND
        ids = [list(req.origin_input_ids) + list(req.output_ids) for req in reqs]
        batch.seq_lens = torch.tensor([len(one) for one in ids])
        tokens = self._sample(batch, torch.tensor([one[-1] for one in ids]), ForwardMode.EXTEND)
        if self.num_drafts:
            batch.input_ids = torch.tensor([token for one in ids for token in one])
            batch.extend_lens = [len(one) for one in ids]
            self._first_drafts(batch, tokens, drafts)

    def _first_drafts(
        self, batch: Any, tokens: torch.Tensor, drafts: dict[str, EagleDraftInput]
    ) -> None:
        """Make drafts after a prefill whose tokens were sampled."""
        with _patched(
            sys.modules[self.draft_worker.__module__],
            ForwardBatch=SimpleNamespace(init_new=lambda *_, **__: draft_step(tokens)),
            **self.patches,
        ):
            made = self.draft_worker._draft_extend_for_prefill(
                self.worker, batch, torch.zeros(len(batch.input_ids), 2), tokens
            )
        _store(drafts, batch, made)

    def _next_drafts(self, batch: Batch, result: GenerationBatchResult) -> None:
        """Make drafts after a step that verified some."""
        tokens = result.next_token_ids.to(torch.int64)
        extend = draft_step(tokens, spec_info=SimpleNamespace())
        with _patched(
            sys.modules[self.draft_worker.__module__],
            prepare_for_draft_extend=lambda *_, **__: extend,
            **self.patches,
        ):
            self.draft_worker._draft_extend_for_decode(self.worker, batch, result)

    def _step(self, reqs: list[Req]) -> None:
        batch = Batch(reqs)
        self._sample(batch, torch.tensor([req.output_ids[-1] for req in reqs]), ForwardMode.DECODE)

    def _draft(self, step: Any) -> torch.Tensor:
        drafts: torch.Tensor = self.draft_worker.draft_forward(self.worker, step)[2]
        return drafts

    def _drafted_step(self, reqs: list[Req], drafts: dict[str, EagleDraftInput]) -> None:
        batch, count = Batch(reqs), len(reqs)
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        lens = [len(req.origin_input_ids) + len(req.output_ids) - 1 for req in reqs]
        batch.seq_lens = torch.tensor(lens)
        bonus = torch.tensor([req.output_ids[-1] for req in reqs])
        spec_info = EagleDraftInput(
            topk_p=torch.ones(count, 1),
            topk_index=torch.tensor([drafts[req.rid] for req in reqs]),
            hidden_states=torch.zeros(count, 2),
            bonus_tokens=bonus,
        )
        step = draft_step(
            bonus,
            spec_info=spec_info,
            out_cache_loc=torch.zeros(count * self.num_drafts, dtype=torch.long),
            positions=batch.seq_lens.clone(),
            req_pool_indices=batch.req_pool_indices,
            sampling_info=batch.sampling_info,
        )
        drafted = self._draft(step)
        rows = torch.cat([bonus.unsqueeze(1), drafted], 1)
        width = self.num_drafts + 1
        verify_input = EagleVerifyInput(
            draft_token=rows.flatten(),
            custom_mask=None,
            positions=None,
            retrieve_index=torch.arange(count * width).view(count, width),
            retrieve_next_token=None,
            retrieve_next_sibling=None,
            retrieve_cum_len=None,
            spec_steps=self.num_drafts,
            topk=1,
            draft_token_num=width,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=0,
            seq_lens_cpu=None,
        )
        output = LogitsProcessorOutput(
            next_token_logits=self.table[rows.flatten()].clone(),
            hidden_states=_hidden(batch.seq_lens.repeat_interleave(width), width),
        )
        mask = self.grammar_mask
        if batch.has_grammar:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=GrammarTree.from_linear_chain(rows),
                sampling_info=batch.sampling_info,
                device="cpu",
                barrier=None,
            )
        predict, lens, index = worker_common.eagle_sample(verify_input, batch, output, mask)
        assert predict.dtype == lens.dtype == index.dtype == torch.int32
        assert 0 <= int(predict.min()) <= int(predict.max()) < VOCAB
        if batch.return_logprob:
            if hasattr(logprobs, "compute_spec_logprobs"):  # 0.5.23
                logprobs.compute_spec_logprobs(batch, output, predict, accept_index=index)
            else:
                logprobs.compute_spec_v2_logprobs(batch, output, predict, index, self.num_drafts)
        for i in range(count):
            expected = [i * width + j if j < lens[i] else -1 for j in range(width)]
            assert index[i].tolist() == expected
        self.counts.steps += count
        self.counts.tokens += int(lens.sum())
        result = GenerationBatchResult(
            logits_output=output,
            accept_lens=lens,
            next_token_ids=predict,
            new_seq_lens=batch.seq_lens + lens,
            next_draft_input=EagleDraftInput(bonus_tokens=bonus),
            speculative_num_draft_tokens=width,
        )
        self._next_drafts(batch, result)
        _store(drafts, batch, result.next_draft_input)
        batch.forward_mode = ForwardMode.DECODE
        self._process(batch, result)


def _hidden(positions: torch.Tensor, width: int = 1) -> torch.Tensor:
    """Return hidden states that show the positions of their rows, `width` in a sequence."""
    offsets = torch.arange(len(positions)) % width
    return (positions + offsets).float().unsqueeze(1).repeat(1, 2)


def _store(drafts: dict[str, Any], batch: Batch, draft_input: EagleDraftInput) -> None:
    for req, columns in zip(batch.reqs, draft_input.topk_index.tolist(), strict=True):
        drafts[req.rid] = columns


@contextlib.contextmanager
def _patched(module: Any, **values: Any) -> Any:
    given = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(given)
