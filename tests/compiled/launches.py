"""Launches of every kernel of the package, at sizes of real models.

Values never matter where nothing runs: memory that only kernels would touch is never written.
Host-side code reads a few numbers; those are zeros.
"""

from __future__ import annotations

import dataclasses
import os
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from mtp_plugin.hosts.embedded.attention.triton import TritonBackend
from mtp_plugin.hosts.embedded.attention.types import RowCounts
from mtp_plugin.hosts.embedded.kv_cache import PagedKVPools
from mtp_plugin.hosts.embedded.layers import experts
from mtp_plugin.hosts.embedded.layers.experts import RouterRule
from mtp_plugin.hosts.embedded.layers.mlp import silu_mul
from mtp_plugin.hosts.embedded.layers.norm import Norm, add_rms_norm, join_norms, rms_norm
from mtp_plugin.hosts.embedded.layers.rotary import Angles, HeadLayout, HeadNorms, rotate
from mtp_plugin.hosts.embedded.row_table import Row, RowTable
from mtp_plugin.hosts.embedded.step_inputs import generation_inputs
from mtp_plugin.hosts.megatron.kv_rewind import rewind_kv_cache
from mtp_plugin.hosts.megatron.next_forward import prepare_next_forward_pass
from mtp_plugin.hosts.megatron.token_verify import (
    required_logit_indices,
    verify_speculative_tokens,
)
from mtp_plugin.ops.acceptance import AcceptanceRules, RelaxedRule, accept
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.draft import (
    draft_argmax,
    propose,
    propose_processed,
    shift_state_window,
    write_drafts,
)
from mtp_plugin.ops.draft_inputs import (
    DraftKVLengths,
    DraftWindows,
    History,
    TargetRows,
    advance_and_build_inputs,
    advance_history,
    build_reused_inputs,
)
from mtp_plugin.ops.logit_mask import mask_disallowed_tokens
from mtp_plugin.ops.logit_rows import LogitRows, ThinkingRule
from mtp_plugin.ops.logits_processor_state import DraftMask, LogitsProcessorState
from mtp_plugin.ops.logprobs import compute_logprobs
from mtp_plugin.ops.lookup import look_up_drafts
from mtp_plugin.ops.penalties import penalize_logits
from mtp_plugin.ops.row_sums import RowSums
from mtp_plugin.ops.sampler_store import ResultTensors, store_results
from mtp_plugin.ops.sampling import (
    DRAFT_COLUMNS,
    STEP_COLUMN,
    ProposedDrafts,
    Role,
    TargetSamples,
    keep_draft_probs,
    processed_scores,
    rejection_sample,
    sample_tokens,
)
from mtp_plugin.ops.state_rollback import mamba_state_selective_copy
from mtp_plugin.ops.step import Accepted, DraftOutput, SlotRows, StepLayout
from mtp_plugin.ops.synthetic_acceptance import synthetic_acceptance, synthetic_rule
from mtp_plugin.ops.thinking_budget import force_thinking_end, update_thinking_state
from mtp_plugin.ops.token_history import update_token_history
from mtp_plugin.requests.columns import REQUEST_COLUMNS, SlotColumn, TableColumns
from mtp_plugin.requests.thinking import ThinkingEnd

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
I32, I64 = torch.int32, torch.int64
VOCAB, HIDDEN = 129280, 7168

Case = TypeVar("Case")
EVERY = os.environ.get("COMPILE_EVERY_VARIANT") == "1"


def variants(usual: list[Case], others: list[Case]) -> list[Case]:
    """The cases that cover the branches of the kernels; with `EVERY`, other types and sizes too."""
    return [*usual, *(others if EVERY else [])]


def floats(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def ints(*shape: int, dtype: torch.dtype = I32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def slot_rows(requests: int, vocab: int = VOCAB) -> SlotRows:
    """Of a table that has the columns of all modes too."""
    kinds = {"pool": float, "thinking": int, "relaxed_topk": int, "relaxed_limit": float}
    of_modes = [*DRAFT_COLUMNS, STEP_COLUMN, *(SlotColumn(*column) for column in kinds.items())]
    columns = TableColumns([*REQUEST_COLUMNS, *of_modes])
    words = -(-vocab // 32)
    pools = LogitsProcessorState(
        bias=floats(2, vocab, dtype=F32),
        allowed=ints(2, words + 1),
        counts=ints(2, vocab, dtype=torch.int16),
        seen=ints(2, words),
        words=ints(2, 64, 16),
    )
    draft_mask = DraftMask(ints(2, words + 1), ints(3, 96))
    return SlotRows(ints(64, columns.width), ints(requests, dtype=I64), columns, pools, draft_mask)


# --- ops of a step ---


def compile_acceptance() -> None:
    cases = variants([(3, 2, 4, BF16), (3, 0, 32, F32)], [(8, 0, 1, F16)])
    for case, (k, contexts, generations, dtype) in enumerate(cases):
        layout = StepLayout((5,) * contexts, generations, k, ints(contexts))
        requests, drafts = layout.num_requests, ints(generations, k)
        logits = floats(layout.num_logit_rows, VOCAB, dtype=dtype)
        accept(layout, logits, drafts, backend=Backend.TRITON)
        given = {
            "draft_lens": ints(generations),
            "final_context": ints(contexts, dtype=torch.bool) if contexts else None,
            "last_tokens": ints(requests, k + 1)[:, 0],
        }
        slots = slot_rows(requests)
        # a column of the table, or what a host put in its place
        pool = slots.table[:, -5].view(F32) if contexts else floats(64, dtype=F32)
        rule = RelaxedRule(slots, pool, begin_token=128798, end_token=128799)
        forced = ints(generations)
        ids = ints(layout.num_logit_rows)
        chosen = [
            AcceptanceRules(
                some, choices=ids, forced_ids=ids, processed_slots=slots, forced_matches=forced
            )
            for some in (None, rule)
        ]
        rules = [
            AcceptanceRules(forced_matches=forced),
            AcceptanceRules(relaxed=rule),
            AcceptanceRules(rule, forced_matches=forced),
            *chosen,
        ]
        for number, one in enumerate(rules):
            # without EVERY each type has every other rule, with rows in order or ragged ones
            if not EVERY and number % 2 != case:
                continue
            for first_rows in (None, ints(requests)) if EVERY else ((None, ints(requests))[case],):
                given["first_rows"] = first_rows
                accept(layout, logits, drafts, one, **given, backend=Backend.TRITON)


def compile_logit_masks() -> None:
    for contexts, generations, dtype in ((0, 8, BF16), (3, 8, F32)):
        positions = ints(contexts * 5 + generations * 4, dtype=I64)
        layout = StepLayout((5,) * contexts, generations, 3, ints(contexts), positions)
        slots = slot_rows(layout.num_requests)
        logits = floats(layout.num_logit_rows, VOCAB, dtype=dtype)
        rows = LogitRows.of_target(layout, ints(generations * 3))
        for some in (slots, dataclasses.replace(slots, pools=None)):
            with mask_disallowed_tokens(logits, rows, some, backend=Backend.TRITON):
                pass
        for drafts in (ints(generations, 3), None):
            given = dataclasses.replace(rows, drafts=drafts)
            penalize_logits(logits.float(), given, slots, backend=Backend.TRITON)
        accepted = Accepted.unwritten(layout.num_requests, 3, "cpu")
        update_token_history(accepted, slots, backend=Backend.TRITON)
        drafted = rows.positions
        update_token_history(accepted, slots, drafted, backend=Backend.TRITON)


def compile_lookup() -> None:
    for dtype, k in ((I32, 3), (I64, 1)):
        tokens, lengths = ints(4, 4096, dtype=dtype), ints(4)
        look_up_drafts(tokens, lengths, k, backend=Backend.TRITON)
        rows, drafts = ints(3, dtype=I64), ints(3, 3, dtype=I64)
        for noted in ({}, {"matches": torch.zeros(4, dtype=torch.bool), "num_sampled": ints(3)}):
            given = {"rows": rows, "drafts": drafts, **noted}
            look_up_drafts(tokens, lengths, k, **given, backend=Backend.TRITON)


def compile_sampling_of_raw_rows() -> None:
    # rows with logits processing are in `sampling`
    requests, width = 100, 4
    rows = LogitRows(0, width, ints(requests, dtype=I64), drafts=ints(requests, 4))
    logits = floats(requests * width, VOCAB)
    sample_tokens(
        logits,
        rows,
        dataclasses.replace(slot_rows(requests), pools=None),
        role=Role.TARGET,
        truncation=floats(len(logits), 4, dtype=F32),
        sums=RowSums.unwritten(logits),
        backend=Backend.TRITON,
    )


def compile_thinking() -> None:
    for k, contexts, end in ((3, 2, (5, 6)), (0, 0, (7,)), (8, 0, (1, 2, 3))):
        layout = StepLayout((5,) * contexts, 4, k, ints(contexts))
        rule = ThinkingRule.of(ThinkingEnd(128798, end), "cpu")
        slots, requests = slot_rows(layout.num_requests), layout.num_requests
        where = layout, ints(4 * k, dtype=I64 if k == 8 else I32), slots, rule
        force_thinking_end(*where, ints(layout.num_logit_rows), backend=Backend.TRITON)
        accepted = Accepted.unwritten(requests, k, "cpu")
        update_thinking_state(accepted, slots, rule, backend=Backend.TRITON)


def compile_rejection_sampling() -> None:
    for requests, k, vocab, dtype, ids in variants(
        [(8, 3, VOCAB, F32, None), (100, 3, VOCAB, BF16, None), (8, 1, VOCAB, F32, ints(32768))],
        [(1, 16, 202048, F16, None)],
    ):
        slots = slot_rows(requests, vocab)
        raw = dataclasses.replace(slots, pools=None)
        for some in (slots, raw) if EVERY else (slots if requests > 8 else raw,):
            pool = floats(64, k, vocab, dtype=F32)
            words = vocab if ids is None else len(ids)
            drafts = ints(requests, k)
            positions = ints(requests, dtype=I64)
            rows = LogitRows(0, 1, positions, ints(requests), 0, drafts)
            logits, cuts = floats(requests, words, dtype=dtype), floats(requests, 4, dtype=F32)
            keep_draft_probs(logits, rows, some, cuts, pool, vocab_ids=ids, backend=Backend.TRITON)
            rows = LogitRows(0, k + 1, positions, drafts=drafts)
            number = requests * (k + 1)
            rejection_sample(
                floats(number, vocab, dtype=dtype),
                rows,
                some,
                ProposedDrafts(drafts, pool, ints(requests) if ids is None else None),
                TargetSamples(
                    ints(number),
                    floats(number, 4, dtype=F32),
                    None if dtype is F32 else ints(number),
                ),
                by_block=dtype is not BF16,
                backend=Backend.TRITON,
            )


def compile_processed() -> None:
    """What processed log-probabilities are of, as steps of prompts and generations ask for it."""
    for contexts, generations, k, vocab, dtype, forces in (
        (0, 8, 3, VOCAB, F32, True),
        (2, 8, 3, VOCAB, BF16, False),
        (0, 256, 0, 202048, F16, False),
    ):
        requests, rows = contexts + generations, contexts + generations * (k + 1)
        drafts = ints(generations, k) if k else None
        processed_scores(
            floats(rows, vocab, dtype=dtype),
            LogitRows(contexts, k + 1, ints(requests), drafts=drafts),
            slot_rows(requests, vocab),
            floats(rows, 4, dtype=F32),
            ints(rows) if forces else None,
            backend=Backend.TRITON,
        )


def compile_logprobs() -> None:
    for contexts, generations, k, vocab, dtype, num_logprobs in variants(
        [(2, 8, 3, VOCAB, F32, None), (0, 256, 0, VOCAB, BF16, 20)],
        [(0, 8, 3, VOCAB, BF16, None), (0, 1, 0, 202048, F16, None)],
    ):
        layout = StepLayout((5,) * contexts, generations, k, ints(contexts))
        requests = layout.num_requests
        logits = floats(layout.num_logit_rows, vocab, dtype=dtype)
        for sums in (None, RowSums.unwritten(logits)) if num_logprobs is None else (None,):
            compute_logprobs(
                layout,
                logits,
                ints(requests, k + 1, dtype=I32 if num_logprobs is None else I64),
                ints(requests),
                slot_rows(requests) if num_logprobs is None else num_logprobs,
                sums=sums,
                backend=Backend.TRITON,
            )


def compile_sampler_store() -> None:
    for status in (None, ints(8)):
        store_results(
            ints(16, 13),
            ints(8, dtype=I64),
            ResultTensors(ints(8, 4), ints(8, 4), ints(8, 3), ints(8), status),
            backend=Backend.TRITON,
        )


def compile_synthetic_acceptance() -> None:
    for shares in ([0.8], [0.8, 0.6, 0.5]):
        rule, k = synthetic_rule(shares, 7), len(shares)
        positions = ints(8 * (k + 1), dtype=I64)[:: k + 1]
        for slots in (None, slot_rows(8)):
            synthetic_acceptance(positions, k, rule, slots, backend=Backend.TRITON)


def compile_draft_inputs() -> None:
    k, generations = 3, 8
    for dtype, hidden, chunks, history in (
        (BF16, HIDDEN, [], []),
        (BF16, HIDDEN, [5, 7], [0, 2]),
        (F32, 2048, [5, 7], [0, 0]),
    ):
        contexts, tokens = len(chunks), sum(chunks)
        requests, rows = contexts + generations, tokens + generations * (k + 1)
        pools = ints(20, k), floats(20, k, hidden, dtype=dtype), ints(requests, dtype=I64)
        successors = ints(contexts) if contexts else None
        read = TargetRows(ints(rows), floats(rows, hidden, dtype=dtype), successors)
        past = History(*pools)
        layout = StepLayout(
            chunk_lens=tuple(chunks),
            num_generations=generations,
            draft_len=k,
            context_lens=ints(contexts) + 1,
            positions=ints(rows, dtype=I64),
        )
        counts, last = ints(requests), ints(requests, k + 1)[:, 0]
        on: dict[str, Any] = {"backend": Backend.TRITON}
        advance_history(layout, past, read, counts, **on)
        step = layout, past, read, counts, last
        kv = DraftKVLengths(ints(requests), 1)
        advance_and_build_inputs(*step, DraftWindows(k, history), **on)
        # prompts without history rows stay in place
        in_place = DraftWindows(k + 1, history, may_overwrite_states=True)
        advance_and_build_inputs(*step, in_place, kv=kv, **on)
        accepted = layout, read, ints(requests, k + 1), counts
        for limit, lengths in ((None, None), (4096, kv)):
            build_reused_inputs(*accepted, max_position=limit, kv=lengths, **on)


def compile_draft_step() -> None:
    requests, k = 8, 3
    last = ints(requests, dtype=I64)
    place = DraftOutput(ints(requests, k), ints(requests, k + 1), 1)
    positions = {"positions": ints(requests, dtype=I64), "max_position": 4096}
    for vocab, more in variants(
        [
            (VOCAB, {"shifted_ids": ints(40), "last_rows": last}),
            (32768, {**positions, "kv_lens": ints(requests), "vocab_ids": ints(32768)}),
        ],
        [(VOCAB, {}), (VOCAB, positions)],
    ):
        filled = dataclasses.replace(place, **more)
        propose(floats(requests, vocab), filled, backend=Backend.TRITON)
        following = LogitRows(0, 1, last, ints(requests), 2, filled.drafts)
        for slots in (slot_rows(requests), None):
            write_drafts(ints(requests), filled, following, slots, backend=Backend.TRITON)
        slots = slot_rows(requests)
        for count in variants([6], [1]):
            rule = ThinkingRule(1, 2, ints(count), ints(count, count))
            write_drafts(ints(requests), filled, following, slots, rule, backend=Backend.TRITON)
            rows = dataclasses.replace(following, column=1)
            logits = floats(requests, vocab)
            propose_processed(logits, filled, rows, slots, following, rule, backend=Backend.TRITON)
    draft_argmax(floats(1, VOCAB), backend=Backend.TRITON)


def compile_state_windows() -> None:
    for dtype, requests in ((BF16, 8), (F32, 300)):
        window = floats(4 * requests + 2, HIDDEN, dtype=dtype)
        last = ints(requests, dtype=I64)
        outputs = floats(4 * requests, HIDDEN, dtype=dtype)
        shift_state_window(window, outputs, last, 1, backend=Backend.TRITON)
        shift_state_window(window, window[1:-1], last, 1, backend=Backend.TRITON)


# --- bookkeeping of hosts ---


def compile_bookkeeping() -> None:
    decode, prefill, drafts, block = 8, 3, 3, 256
    requests, tokens = decode + prefill, decode * (drafts + 1) + prefill
    for dtype, active in ((I64, None), (I32, ints(1))):

        def vector(entries: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return ints(entries, dtype=dtype)

        on: dict[str, Any] = {"backend": Backend.TRITON}
        verify_speculative_tokens(vector(tokens), vector(tokens), decode, prefill, drafts, **on)
        lengths = vector(requests), vector(requests)
        required_logit_indices(*lengths, decode, prefill, num_speculative_tokens=drafts, **on)
        buffers = (
            vector(requests),
            vector(requests),
            ints(decode, drafts, dtype=dtype),
            vector(decode),
        )
        prepare_next_forward_pass(
            decode,
            vector(tokens),
            vector(tokens),
            ints(requests, dtype=I64),
            ints(tokens, dtype=torch.bool),
            vector(tokens),
            *buffers,
            drafts,
            **on,
        )
        state = [*(vector(requests) for _ in range(4)), ints(requests, 64, dtype=dtype)]
        for size in (block, 2):
            rewind_kv_cache(vector(requests), vector(requests), *state, drafts, size, active, **on)


def compile_state_rollback() -> None:
    for dtype, state in ((BF16, (24, 64, 128)), (BF16, (1792, 3)), (torch.int8, (7, 3))):
        mamba_state_selective_copy(
            torch.empty(2, 8, 4, *state, dtype=dtype),
            torch.empty(2, 8, *state, dtype=dtype),
            ints(8),
            ints(8),
            ints(8),
            2,
            backend=Backend.TRITON,
        )


# --- executor ---


def compile_step_inputs() -> None:
    k, slots = 3, 16
    sizes = {"step_rows": k + 1, "table_width": 128, "sentinel_block": 99}
    table = RowTable(8, **sizes, device=torch.device("cpu"))
    rows = table.upload([Row([0] * (k + 1), length=1)] * 8)
    store = SimpleNamespace(
        new_tokens=ints(slots, 2 * k + 3)[:, 1 : k + 2].T.unsqueeze(-1),
        new_tokens_lens=ints(slots, 3)[:, 1],
    )
    for previous in (None, store):
        generation_inputs(rows, previous, draft_len=k, max_seq_len=4096, backend=Backend.TRITON)


def attend(
    dtype: torch.dtype,
    width: int,
    chunks: tuple[int, ...],
    generations: int,
    rows: int,
    block_size: int = 32,
) -> None:
    """One layer of a step: 32 query heads over 8 key heads, tables of 4096 tokens."""
    counts = RowCounts(chunks, generations, rows if generations else 0)
    sequences, num_rows = len(chunks) + generations, sum(chunks) + generations * rows
    step: Any = SimpleNamespace(
        num_seqs=sequences,
        num_tokens=num_rows,
        seq_lens_cuda=ints(sequences),
        kv_lens_cuda=ints(sequences),
        kv_write_limit=ints(sequences),
        block_table=ints(sequences, 128),
        pools=PagedKVPools(2, block_size),
        row_counts=lambda: counts,
    )
    projected = floats(num_rows, 48 * width, dtype=dtype).unflatten(1, (48, width))
    backend = TritonBackend()
    backend.write(0, projected[:, 32:40], projected[:, 40:], step)
    backend.attend(0, projected[:, :32], step)


def compile_attention() -> None:
    for arguments in variants(
        [(BF16, 128, (500, 37), 8, 4), (F16, 80, (9,), 8, 2), (F32, 256, (9,), 1, 1)],
        [(BF16, 64, (500,), 1, 4), (BF16, 256, (500,), 1, 4), (F32, 128, (500,), 1, 4)],
    ):
        attend(*arguments)


def compile_attention_of_long_prompts() -> None:
    for dtype, block_size in variants([(BF16, 32)], [(BF16, 8), (F16, 256)]):
        attend(dtype, 128, (1000, 37), 8, 4, block_size)


def compile_attention_of_large_batches() -> None:
    for arguments in variants(
        [(BF16, 128, (), 64, 4), (F32, 64, (), 64, 4)],
        [(BF16, 128, (), 64, 32), (BF16, 256, (), 64, 1)],
    ):
        attend(*arguments)


# --- fused layers ---


def compile_norms() -> None:
    for dtype, width in ((BF16, 4096), (F32, 7168)):
        x, weight = floats(8, width, dtype=dtype), floats(width, dtype=dtype)
        rms_norm(x, weight, 1e-6, backend=Backend.TRITON)
        add_rms_norm(x, x.clone(), weight, 1e-6, backend=Backend.TRITON)
        for ids, table in ((None, x), (ints(8), floats(VOCAB, width, dtype=dtype))):
            join_norms(
                table,
                ids,
                x,
                Norm(weight, 1e-6),
                Norm(weight, 1e-6),
                embedding_first=ids is None,
                backend=Backend.TRITON,
            )


def compile_rotary() -> None:
    for dtype, layout, half, index in (
        (BF16, HeadLayout(32, 8, 128), 64, ints(8, dtype=I64)),
        (F32, HeadLayout(96, 8, 80), 20, None),
    ):
        cos = floats(8 if index is None else 4096, 2 * half, dtype=dtype)
        weight = floats(layout.head_dim, dtype=dtype)
        for norms in (None, HeadNorms(weight, weight, 1e-6, 1e-6)):
            qkv = floats(8, layout.width, dtype=dtype)
            rotate(qkv, layout, Angles(cos, cos, half, index), norms, backend=Backend.TRITON)


def compile_gating() -> None:
    for dtype, width in ((BF16, 14336), (F32, 700)):
        silu_mul(floats(8, 2 * width, dtype=dtype), backend=Backend.TRITON)


def mixture(dtype: torch.dtype, rows: int, num_experts: int, rule: RouterRule, shared: int) -> None:
    """Every step of one mixture of experts."""
    hidden, width = 2048, 1408
    x = floats(rows, hidden, dtype=dtype)
    on: Any = {"backend": Backend.TRITON}
    logits = experts.router_logits(x, floats(num_experts, hidden, dtype=dtype), **on)
    bias = floats(num_experts, dtype=F32)
    block_rows = experts.block_rows_for(rows)
    blocks = experts.assign(logits, bias, rule, shared=shared, block_rows=block_rows, **on)
    total = num_experts + shared
    active = experts.gate_up(x, floats(total, 2 * width, hidden, dtype=dtype), blocks, **on)
    parts = experts.down(active, floats(total, hidden, width, dtype=dtype), blocks, **on)
    experts.combine(parts, top_k=rule.top_k, shared=shared, **on)


def compile_experts() -> None:
    few = RouterRule(top_k=2, num_groups=1, topk_group=1, normalise=True, scale=1.0)
    grouped = RouterRule(top_k=8, num_groups=8, topk_group=4, normalise=True, scale=2.5)
    for arguments in variants(
        [(BF16, 40, 8, few, 0), (BF16, 1, 256, grouped, 1), (F32, 4, 8, few, 1)],
        [
            (BF16, 4, 8, few, 1),
            (BF16, 256, 8, few, 1),
            (BF16, 600, 4, dataclasses.replace(few, normalise=False), 1),
        ],
    ):
        mixture(*arguments)
