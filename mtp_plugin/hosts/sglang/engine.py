"""Sampling, verification and draft sampling of one scheduler process of SGLang."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from mtp_plugin.errors import ConfigError, HostError
from mtp_plugin.hosts.sglang.requests import (
    Admission,
    admitted,
    facts_of,
    row_owner,
    slot_of,
    slot_tokens,
)
from mtp_plugin.hosts.sglang.results import DraftCounts, keep_status
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.step import STATUS_NO_FINITE_LOGIT, to_device
from mtp_plugin.speculative.rows.options import EngineSettings
from mtp_plugin.speculative.rows.penalties import Penalties
from mtp_plugin.speculative.rows.request_slots import RequestSlots
from mtp_plugin.speculative.rows.row_ops import WARM_UP_ROWS, DraftRows, RowOps

_logger = logging.getLogger("sglang.srt.mtp_plugin")
_MARK = 1e30
"""Logit of a sampled draft: SGLang's own argmax takes it. Finite, since a softmax may follow."""


class Engine:
    """What samples in place of SGLang in one scheduler process."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self._step: Any = None  # ForwardBatch of the rows that are being sampled
        self._sampled: torch.Tensor | None = None
        self._status: torch.Tensor | None = None
        self._drafting: tuple[Any, Any] | None = None  # draft runner and its ForwardBatch
        self._extending: tuple[Any, list[Any]] | None = None
        self._unwritten: dict[int, int] = {}  # slot -> ids of its prefill
        self._rows: dict[int, object] = {}  # slot -> `row_owner` of its row
        self._penalized: dict[int, str] = {}  # slot -> id of its request, if it has penalties

    def attach(self, runner: Any) -> None:
        """Make the slot table of a target's ``ModelRunner``, whose pools are allocated.

        Raises:
            ConfigError: a thinking token outside of the model's vocabulary.
        """
        self._num_drafted = self._vocab = runner.model_config.vocab_size
        for name in ("thinking_begin_token", "thinking_end_token"):
            token = getattr(self.settings.options, name)
            if token is not None and token >= self._vocab:
                raise ConfigError(
                    f"MTP_PLUGIN_SGLANG: {name}: expected a token id of the model, at most "
                    f"{self._vocab - 1}, got {token}"
                )
        self._pool = pool = runner.req_to_token_pool
        num_slots, device = pool.req_to_token.shape[0], torch.device(pool.req_to_token.device)
        self._slots = slots = RequestSlots(num_slots - 1, device, self.settings, padding=0)
        backend = Backend.of(self.settings.options.kernels, device)
        self._ops = RowOps(slots, self.settings, backend, self._vocab, fills_tokens=False)
        self._penalties = Penalties(slots, self._vocab, backend)
        self._draft_step = torch.zeros((), dtype=torch.int64, device=device)
        # of relaxed acceptance and penalties; else nothing reads them
        self._prefill_lens = torch.zeros(num_slots, dtype=torch.int64, device=device)

    @property
    def summary(self) -> str:
        """The line of the log that says how the plugin is on."""
        return (
            "verification {verification}, {drafts} drafts per step, {kernels} kernels, drafter "
            "{drafter}".format(**self.settings.summary, kernels=self._ops.backend.value)
        )

    def expect_attached(self) -> None:
        """Check that the target's pools were seen.

        Raises:
            HostError: they were not.
        """
        if not hasattr(self, "_slots"):
            raise HostError(
                "mtp_plugin found no pools of a target model in this scheduler: unset "
                "MTP_PLUGIN_SGLANG, this engine is not served"
            )

    def count_drafts(self, model: str | None, *, is_first_rank: bool) -> None:
        """Begin to count drafts; see `DraftCounts`."""
        is_simulated = bool(self.settings.num_drafts) and _simulation().SIMULATE_ACC_LEN > 0
        has_alarm = is_first_rank and not is_simulated
        self.counts = DraftCounts(self.settings, model, has_alarm=has_alarm)

    def warm_up(self) -> None:
        """Launch all kernels, so that no request waits until they are compiled."""
        if self._prefill_lens.is_cuda:
            self.launch_kernels()
            torch.cuda.synchronize()

    def launch_kernels(self) -> None:
        """Launch the kernels of all batch sizes on rows of zeros of the row of padding."""
        width, most = self.settings.num_drafts + 1, len(self._prefill_lens)
        for count in [count for count in WARM_UP_ROWS if count <= most * width]:
            slots = self._prefill_lens.new_zeros(count)
            self.follow(
                self._ops.sample(self._zeros(count, self._vocab), slots, slots),
                SimpleNamespace(req_pool_indices=slots, seq_lens=slots, rids=()),
            )
            if width == 1 or count > most:
                continue
            for column in (0, 1):
                self._drafts(self._zeros(count, self._num_drafted), slots, slots, column)
            drafts = slots.new_zeros(count * width)
            logits = self._zeros(count * width, self._vocab)
            self._ops.verify_uniform(logits, drafts, slots, slots, slots.cpu().numpy())
        # alike for all numbers of requests
        slots = self._prefill_lens.new_zeros(1)
        self._penalties.penalize(self._zeros(1, self._vocab), LogitRows.flat(slots), slots)
        for rows in {1, width}:
            tokens = slots.new_zeros(rows)
            if rows > 1:
                self._penalize(self._zeros(rows, self._vocab), tokens, slots, slots)
            self._penalties.count(tokens.to(torch.int32).view(1, -1), slots.to(torch.int32), slots)

    def _zeros(self, rows: int, columns: int) -> torch.Tensor:
        """Return logits [rows, columns] of zeros, for which kernels are compiled as for others."""
        # they depend on whether 16 divides the stride, as it divides that of an expanded row
        memory = self._prefill_lens.new_zeros(1 if columns % 16 == 0 else rows, columns)
        return memory.float().expand(rows, -1)

    # ---- requests

    def seed_from(self, seed: int, rank: int = 0, num_ranks: int = 1) -> None:
        """Begin to admit requests; see `Admission`."""
        self._admission = Admission(self.settings, seed, rank, num_ranks)

    def admit(self, req: Any) -> str | None:
        """Read the options of a ``Req`` once, and give it a seed; returns why it is refused."""
        return self._admission.admit(req)

    def has_row(self, req: Any) -> bool:
        """Whether a ``Req`` has a slot, and the row of it is its own: a streaming session hands its
        slot on to its next request, or to the same one after a retraction."""
        slot = slot_of(req)
        return slot is not None and self._rows.get(int(slot)) == row_owner(req)

    def stage(self, req: Any) -> None:
        """Write the whole row of a request that got a slot, before the next rows are sampled."""
        self._admission.admit(req)  # one that did not pass the queue
        slot, tokens, kept = int(slot_of(req)), slot_tokens(req), admitted(req)
        self._rows[slot] = row_owner(req)
        values = self._slots.values(facts_of(req), kept.options, tokens)
        self._penalized.pop(slot, None)
        if kept.penalties:
            self._penalized[slot] = req.rid
        if kept.is_counted:
            unused = self._pool.free_slots
            values["count_row"] = self._penalties.stage(slot, list(req.output_ids), unused)
        self._slots.stage(slot, values, kept.seed)
        if self.settings.options.is_relaxed or kept.is_counted:
            self._unwritten[slot] = len(tokens)

    def _has_penalties(self, rids: Iterable[str]) -> bool:
        """Whether one of these requests has penalties, or a minimum of tokens."""
        return bool(self._penalized) and not set(self._penalized.values()).isdisjoint(rids)

    def apply(self) -> None:
        """Write staged rows on the current stream, on which earlier steps read the old ones."""
        self._slots.apply()
        self._penalties.apply()
        if self._unwritten:
            device = self._prefill_lens.device
            written = to_device(list(self._unwritten.items()), torch.int64, device)
            self._prefill_lens.index_copy_(0, written[:, 0], written[:, 1])
            self._unwritten = {}

    # ---- rows without drafts

    @contextmanager
    def sampling(self, logits_output: Any, forward_batch: Any) -> Iterator[None]:
        """Sample for a ``ForwardBatch`` in SGLang's ``Sampler``, after penalties: SGLang adds its
        bias and applies its grammars then."""
        self.apply()
        self._step = step = forward_batch
        if self._has_penalties(step.rids):
            rows = LogitRows.flat(self._positions(step))
            logits = logits_output.next_token_logits
            self._penalties.penalize(logits, rows, step.req_pool_indices)
        try:
            yield
        finally:
            self._step = self._sampled = None

    def keep_status(self, logits_output: Any) -> None:
        """Keep which requests got no token in the latest `sample`, for the host."""
        status, self._status = self._status, None
        if status is not None:
            keep_status(logits_output, status)

    @property
    def is_sampling(self) -> bool:
        """Whether the sampler is called for rows of requests."""
        return self._step is not None

    @staticmethod
    def _positions(step: Any) -> torch.Tensor:
        """Return the position [R] of the last token of each row."""
        positions: torch.Tensor = step.positions
        return positions if step.forward_mode.is_decode() else step.seq_lens - 1

    def sample(self, logits: torch.Tensor) -> None:
        """Sample the tokens [R] after rows of logits [R, V], and keep them."""
        step = self._step
        tokens = self._ops.sample(logits, step.req_pool_indices, self._positions(step))
        self._status = (tokens < 0).to(torch.int32) * STATUS_NO_FINITE_LOGIT
        self._sampled = tokens.clamp_min(0)

    def take_sampled(self) -> torch.Tensor | None:
        """Return the tokens [R] int32 that `sample` kept, once."""
        tokens, self._sampled = self._sampled, None
        return tokens

    def follow(self, tokens: torch.Tensor, step: Any) -> None:
        """Update thinking phases and counts after a step without drafts; the token of an unfinished
        prompt is no output."""
        is_relaxed, has_penalties = self.settings.options.is_relaxed, self._has_penalties(step.rids)
        if not is_relaxed and not has_penalties:
            return
        slots, tokens = step.req_pool_indices, tokens.to(torch.int32)
        is_output = step.seq_lens >= self._prefill_lens[slots]
        if is_relaxed:
            self._ops.follow_phase(tokens, slots, is_output)
        if has_penalties:
            self._penalties.count(tokens.unsqueeze(1), is_output.to(torch.int32), slots)

    # ---- verification

    def verify(
        self, verify_input: Any, batch: Any, logits_output: Any, grammar_mask: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Verify the drafts of a ``ScheduleBatch``, in place of ``eagle_sample``.

        Returns:
            predict: [R * (K+1)] int32, the token after each row, 0 where there is none.
            accept_lens: [R] int32, output tokens. accept_index: [R, K+1] int32, their rows, then
            -1.
        """
        self.apply()
        logits, width = logits_output.next_token_logits, verify_input.draft_token_num
        if width != self.settings.num_drafts + 1:
            raise HostError(
                f"mtp_plugin: expected {self.settings.num_drafts} drafts per request, got "
                f"{width - 1}: unset --speculative-adaptive"
            )
        slots, host_slots = batch.req_pool_indices, batch.req_pool_indices_cpu.numpy()
        import_module("sglang.srt.utils.async_probe").sanitize_nan_logits(
            logits, "verify: target model logits"
        )
        has_penalties = self._has_penalties(req.rid for req in batch.reqs)
        if has_penalties:
            self._penalize(logits, verify_input.draft_token, batch.seq_lens, slots)
        _edit(logits, batch.sampling_info, width, grammar_mask)
        accepted = self._ops.verify_uniform(
            logits, verify_input.draft_token, batch.seq_lens, slots, host_slots
        )
        # a request without any token has token 0, and ends
        counts, status = accepted.num_accepted, accepted.status
        rows: Any = accepted.rows
        predict, index = accepted.tokens.view(-1), rows.view(-1)
        predict, counts, index, status = _of_first_rank(predict, counts, index, status)
        keep_status(logits_output, status)
        index = index.view(-1, width)
        predict, counts, index = _simulated(verify_input, logits, predict, counts, index)
        if has_penalties:
            # a clone: a part of a broadcast may be aligned otherwise than kernels are compiled for
            self._penalties.count(predict.view(-1, width), counts.clone(), slots)
        return predict, counts, index

    def _penalize(
        self,
        logits: torch.Tensor,
        drafts: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Apply penalties to the logits of all drafts; ``drafts`` as in `RowOps.verify_uniform`."""
        drafts = drafts.view(len(slots), -1)
        rows = LogitRows(0, drafts.shape[1], positions, drafts=drafts[:, 1:])
        self._penalties.penalize(logits, rows, slots)

    # ---- drafts

    def drafts_from(self, worker: Any) -> None:
        """Read the token map of a draft worker, whose pools are allocated."""
        if worker.hot_token_id is not None:
            self._num_drafted = len(worker.hot_token_id)
            self._ops.set_draft_ids(worker.hot_token_id)

    @contextmanager
    def drafting(self, runner: Any, forward_batch: Any) -> Iterator[None]:
        """Choose drafts 2 to K: mark one in the logits of every forward of a draft runner."""
        self._drafting = runner, forward_batch
        try:
            yield
        finally:
            self._drafting = None

    @contextmanager
    def extending(self, runner: Any) -> Iterator[list[Any]]:
        """Keep the outputs of a draft runner's forward, from which draft 1 is chosen."""
        kept: list[Any] = []
        self._extending = runner, kept
        try:
            yield kept
        finally:
            self._extending = None

    def after_forward(self, runner: Any, output: Any) -> None:
        """See the ``LogitsProcessorOutput`` of a forward of any runner."""
        if self._drafting is not None and runner is self._drafting[0]:
            step = self._drafting[1]
            logits = output.next_token_logits
            if not len(logits):  # an idle rank, whose slots may be padded
                return
            drafts = self._drafts(logits, step.req_pool_indices, step.positions, 1)
            logits.scatter_(1, drafts.unsqueeze(1), _MARK)
        elif self._extending is not None and runner is self._extending[0]:
            self._extending[1].append(output)

    def first_drafts(
        self, kept: list[Any], draft_input: Any, batch: Any, positions: torch.Tensor
    ) -> None:
        """Replace draft 1 of an ``EagleDraftInput``.

        Args:
            kept: by `extending`; SGLang leaves the logits [R, V] of the drafts in the last one.
            positions: [R] of the last token of each request.
        """
        if batch.forward_mode.is_idle() or not len(batch.req_pool_indices):
            return
        logits = kept[-1].next_token_logits
        drafts = self._drafts(logits, batch.req_pool_indices, positions, 0)
        draft_input.topk_index = drafts.unsqueeze(1)

    def _drafts(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, column: int
    ) -> torch.Tensor:
        """Sample a draft per row; returns columns of the logits [R] int64."""
        return self._ops.sample_drafts(
            DraftRows(logits, slots, positions, column, self._draft_step)
        )


def _edit(logits: torch.Tensor, info: Any, width: int, grammar_mask: Any) -> None:
    """Apply SGLang's bias, grammar and custom processors to the logits [R * width, V]."""
    if info.logit_bias is not None:
        logits.add_(info.logit_bias.repeat_interleave(width, 0))
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    if info.has_custom_logit_processor:
        # as without drafts, which their requests do not accept
        sampler = import_module("sglang.srt.layers.sampler")
        sampler.apply_custom_logit_processor(logits[::width], info)


def _of_first_rank(*results: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the results of the first rank that has these requests, all int32 vectors: the noise is
    equal on all ranks, logits may differ."""
    group = import_module("sglang.srt.distributed").get_tp_group()
    if import_module("sglang.srt.layers.dp_attention").is_dp_attention_enabled():
        group = import_module("sglang.srt.runtime_context").get_parallel().attn_tp_group
    if group.world_size == 1:
        return results
    packed = torch.cat(results)
    group.broadcast(packed, src=0)
    return torch.split_with_sizes(packed, [len(result) for result in results])


def _simulation() -> Any:
    """Return the module that simulates acceptance, if ``SGLANG_SIMULATE_ACC_LEN`` is set."""
    return import_module("sglang.srt.speculative.spec_utils")


def _simulated(
    verify_input: Any,
    logits: torch.Tensor,
    predict: torch.Tensor,
    counts: torch.Tensor,
    index: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Let SGLang simulate acceptance, if ``SGLANG_SIMULATE_ACC_LEN`` is set."""
    spec = _simulation()
    if spec.SIMULATE_ACC_LEN <= 0:
        return predict, counts, index
    requests, width = index.shape
    correct = counts - 1
    index = spec.generate_simulated_accept_index(
        accept_index=index,
        predict=predict,
        num_correct_drafts=correct,
        candidates=verify_input.draft_token.view(requests, width),
        target_predict=logits.argmax(-1).view(requests, width),
        simulate_acc_len=spec.SIMULATE_ACC_LEN,
        simulate_acc_token_mode=spec.SIMULATE_ACC_TOKEN_MODE,
        bs=requests,
        spec_steps=width - 1,
    )
    return predict, correct + 1, index
