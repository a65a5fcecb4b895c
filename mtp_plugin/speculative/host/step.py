"""Read the metadata of a host engine's step, once per step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from typing_extensions import Self

from mtp_plugin.errors import MetadataError, expect_int, format_value
from mtp_plugin.ops.checks import INTEGERS, expect_tensor
from mtp_plugin.ops.step import Accepted, SamplingKind, SlotRows, StepLayout, to_device
from mtp_plugin.requests.states import is_graph_dummy_id
from mtp_plugin.speculative.host.protocols import AttentionMetadata
from mtp_plugin.speculative.host.ranks import ALONE, RankRows

_NOT_RECORDED: Any = object()
"""Metadata of a host engine that does not record what `prepare` was called for."""


@dataclass(frozen=True)
class HostStep:
    """One step as the host engine's metadata describes it."""

    layout: StepLayout
    draft_tokens: torch.Tensor  # [G*K] integer
    draft_lens: torch.Tensor | None = None  # [G] integer; None: K everywhere
    next_prompt_tokens: torch.Tensor | None = None
    """[C] integer: the prompt token after each chunk, -1 if the chunk ends its prompt; None: not
    given by the host engine."""
    known_successors: torch.Tensor | None = None
    """[C] integer: ``next_prompt_tokens``, or what the manager knows of them; None: every chunk is
    taken to end its prompt."""
    final_context: torch.Tensor | None = None
    """[C] bool: whether the chunk ends its prompt; None: all do."""
    manager: Any = None
    """The MTP manager, whose pools are read in every step; None: there is none."""
    slot_ids: torch.Tensor | None = None  # [R] int64: rows of the pools and of the slot table
    slots: SlotRows | None = None
    """Slot-table and pool rows of the step's requests; None: there is no manager."""
    sampling_kind: SamplingKind = SamplingKind.GREEDY
    """The most general kind among the requests; their options are in their slots."""
    max_position: int | None = None  # None: unbounded
    kv_lens: torch.Tensor | None = None  # [>= R] int32; None: the backend has none
    after_acceptance: Callable[[torch.Tensor], Any] | None = None
    """Called with the number of accepted tokens [R] int32 before the draft loop."""
    after_verification: Callable[[Accepted, torch.Tensor | None], Any] | None = None
    """Called with the accepted tokens and their log-probabilities before the draft loop."""
    ranks: RankRows = ALONE

    @classmethod
    def read(
        cls,
        attn_metadata: AttentionMetadata,
        spec_metadata: Any,
        max_draft_len: int,
        positions: torch.Tensor | None = None,
        *,
        draft_len: int | None = None,
    ) -> Self:
        """Read the metadata of a host engine.

        Args:
            max_draft_len: K if the metadata has no ``runtime_draft_len``.
            positions: [T], if the caller has them.
            draft_len: K of the step, overriding the metadata.

        Raises:
            MetadataError: the draft length is out of range, or the request ids do not fit.
            TensorContractError: counts and tensors do not fit each other.
        """
        if draft_len is None:
            draft_len = read_step_draft_len(spec_metadata, max_draft_len)
        read_num_seqs(attn_metadata)
        layout = read_layout(attn_metadata, spec_metadata, draft_len, positions)
        drafts = getattr(spec_metadata, "draft_tokens", None)
        if drafts is None:
            device = attn_metadata.seq_lens_cuda.device
            drafts = torch.empty(0, dtype=torch.int32, device=device)
        expect_tensor("draft_tokens", drafts, dtype=INTEGERS)
        lens = getattr(spec_metadata, "draft_lens", None)
        prompts = getattr(spec_metadata, "next_prompt_tokens", None)
        if prompts is not None:
            # one of another size would end prompts early, or never
            expect_tensor(
                "next_prompt_tokens", prompts, dtype=INTEGERS, shape=(layout.num_contexts,)
            )
        successors = prompts
        manager = getattr(spec_metadata, "mtp_hidden_states_manager", None)
        slot_ids = getattr(spec_metadata, "slot_ids", None)
        slot_ids = None if slot_ids is None else slot_ids[: layout.num_requests]
        rows_of = getattr(manager, "slot_rows", None)
        request_ids: Sequence[int] | None = None
        if manager is not None:
            prepared = getattr(spec_metadata, "prepared_ids", _NOT_RECORDED)
            if prepared is None:
                slot_ids = None  # the buffer holds zeros, which is another request's slot
            request_ids = read_request_ids(
                spec_metadata, attn_metadata, manager, layout.num_requests, prepared
            )
        sampling_kind = read_sampling_kind(spec_metadata, manager, request_ids)
        if prompts is None and layout.num_contexts:
            known = known_successors(manager, (request_ids or ())[: layout.num_contexts])
            if known is not None:
                device = attn_metadata.seq_lens_cuda.device
                successors = to_device(known, torch.int32, device)
        ends = None
        if successors is not None and layout.num_contexts:
            ends = successors < 0
        return cls(
            layout=layout,
            draft_tokens=drafts.reshape(-1)[: layout.num_generations * layout.draft_len],
            draft_lens=_draft_lens(lens, layout, drafts.device, attn_metadata),
            next_prompt_tokens=prompts,
            known_successors=successors,
            final_context=ends,
            manager=manager,
            slot_ids=slot_ids,
            slots=None if rows_of is None or slot_ids is None else rows_of(slot_ids),
            sampling_kind=sampling_kind,
            max_position=getattr(spec_metadata, "max_position", None),
            kv_lens=getattr(attn_metadata, "kv_lens_cuda", None),
            after_acceptance=getattr(attn_metadata, "after_acceptance", None),
            after_verification=getattr(attn_metadata, "after_verification", None),
            ranks=RankRows.read(attn_metadata, spec_metadata),
        )

    def context_successors(self, last_tokens: torch.Tensor) -> torch.Tensor | None:
        """Return the token after each context's last row [C]: the sampled one, or the next token
        of a prompt whose chunk does not end it; None without contexts.

        Args:
            last_tokens: [R], the last output token of each request.
        """
        return self.next_context_tokens(last_tokens) if self.layout.num_contexts else None

    def next_context_tokens(self, last_tokens: torch.Tensor) -> torch.Tensor:
        """Return :meth:`context_successors` for a step that has contexts."""
        sampled = last_tokens[: self.layout.num_contexts]
        if self.known_successors is None:
            return sampled
        known = self.known_successors.to(sampled.dtype)
        return torch.where(known >= 0, known, sampled)

    @property
    def draft_probs(self) -> torch.Tensor | None:
        """Distributions that the drafts of every slot were sampled from [S, K, V] float32; None if
        the manager does not store them."""
        pool: torch.Tensor | None = getattr(self.manager, "draft_probs", None)
        return pool

    @property
    def relaxed_delta_pool(self) -> torch.Tensor | None:
        """The manager's ``mtp_relaxed_delta_pool`` [S] float32; None: it has none."""
        pool: torch.Tensor | None = getattr(self.manager, "mtp_relaxed_delta_pool", None)
        return pool

    def expect_slots(self) -> SlotRows:
        """Return `slots`.

        Raises:
            MetadataError: there is no manager, or it has no slot table.
        """
        self.expect_manager()
        if self.slots is None:
            raise MetadataError(
                "this step needs a manager with a slot table, got "
                f"{type(self.manager).__name__} without slot_rows()"
            )
        return self.slots

    def sampling_slots(self) -> SlotRows:
        """Return `slots`, without the logits-processing pools if no request uses them.

        Raises:
            MetadataError: there is no manager, or it has no slot table.
        """
        slots = self.expect_slots()
        is_sampled = self.sampling_kind is SamplingKind.SAMPLED
        return replace(slots, pools=None, draft_mask=None) if is_sampled else slots

    def expect_manager(self) -> tuple[Any, torch.Tensor]:
        """Return the MTP manager and the pool rows of the requests [R] int64.

        Raises:
            MetadataError: one of them is missing.
        """
        if self.manager is None:
            raise MetadataError("this step needs spec_metadata.mtp_hidden_states_manager, got None")
        if self.slot_ids is None:
            raise MetadataError("this step needs spec_metadata.slot_ids: call prepare() first")
        return self.manager, self.slot_ids


def read_sampling_kind(
    spec_metadata: Any, manager: Any, request_ids: Sequence[int] | None
) -> SamplingKind:
    """Return the most general sampling kind among the requests of a step.

    ``sampling_kind`` of the metadata decides; where it is None or missing, the manager's options of
    ``request_ids`` do. A host engine that chooses graphs by ``is_all_greedy_sample`` captures with
    requests that the manager does not know: where it is False the step serves every option. A
    captured step serves either every option or only greedy requests, because other requests may
    replay it.

    Raises:
        MetadataError: the options are unknown, because there are no request ids.
    """
    given = getattr(spec_metadata, "sampling_kind", None)
    if given is not None:
        return SamplingKind(given)
    if manager is None:
        return SamplingKind.GREEDY
    if request_ids is None and getattr(manager, "any_request_options", False):
        raise MetadataError(
            "request_ids: expected the ids of the step's requests, got None, and the manager holds "
            "requests with sampling options; assign request_ids and call prepare()"
        )
    kind = sampling_kind_of(manager, request_ids or ())
    is_graph = bool(getattr(spec_metadata, "is_cuda_graph", False))
    if kind is SamplingKind.GREEDY:
        is_greedy = getattr(spec_metadata, "is_all_greedy_sample", True)
        return SamplingKind.GREEDY if is_greedy else SamplingKind.PROCESSED
    return SamplingKind.PROCESSED if is_graph else kind


def sampling_kind_of(manager: Any, request_ids: Iterable[int]) -> SamplingKind:
    """Return the most general sampling kind among these requests, greedy if it is unknown."""
    of_requests = getattr(manager, "sampling_kind_of", None)
    if of_requests is None:
        return SamplingKind.GREEDY
    kind: SamplingKind = of_requests(request_ids)
    return kind


def read_request_ids(
    spec_metadata: Any,
    attn_metadata: Any,
    manager: Any,
    num_requests: int,
    prepared: Any = _NOT_RECORDED,
) -> list[int] | None:
    """Return the ids of a step's requests in batch order; None if the metadata has none.

    Args:
        prepared: ids that ``prepare()`` was last called for, None before the first call.

    Raises:
        MetadataError: the ids are not those of this step, in its order and distinct, or the slots
            belong to another step.
    """
    ids = getattr(spec_metadata, "request_ids", None)
    is_prepared = prepared is not _NOT_RECORDED and prepared is not None
    if ids is None and not is_prepared:
        return None
    if ids is None or isinstance(ids, torch.Tensor):
        got = "None" if ids is None else "a Tensor"
        raise MetadataError(f"request_ids: expected a list of {num_requests}, got {got}")
    ids = list(ids)
    if len(ids) != num_requests:
        raise MetadataError(
            f"request_ids: expected a list of {num_requests}, got {format_value(ids)}"
        )
    if is_prepared and prepared != ids:
        raise MetadataError(
            f"request_ids: {format_value(ids)}, and prepare() was called for "
            f"{format_value(prepared)}"
        )
    attn_ids = getattr(attn_metadata, "request_ids", None)
    if isinstance(attn_ids, Sequence) and len(attn_ids) and list(attn_ids) != ids:
        raise MetadataError(
            f"request_ids: {format_value(ids)} in the speculative metadata "
            f"and {format_value(list(attn_ids))} in the attention metadata; "
            f"expected the batch's requests in the same order"
        )
    if not is_prepared:  # else prepare() has checked them
        expect_distinct_ids(ids, manager)
    return ids


def expect_distinct_ids(request_ids: Sequence[int], manager: Any) -> None:
    """Check that no id is listed twice, except those of graph padding and of dummy requests.

    Raises:
        MetadataError: two rows of the step would share a slot.
    """
    if len({*request_ids}) == len(request_ids):
        return
    is_dummy = getattr(manager, "is_dummy", is_graph_dummy_id)
    twice = [n for n, count in Counter(request_ids).items() if count > 1 and not is_dummy(n)]
    if twice:
        raise MetadataError(
            f"request_ids: expected every request once, got {format_value(twice[0])} "
            f"{list(request_ids).count(twice[0])} times in {format_value(list(request_ids))}"
        )


def known_successors(manager: Any, request_ids: Sequence[int]) -> list[int] | None:
    """Return the prompt token after the chunk of each context, -1 if the chunk ends its prompt;
    None if every chunk does, or the manager does not know."""
    successors_of = getattr(manager, "successors_of", None)
    if successors_of is None:
        return None
    successors: list[int] | None = successors_of(request_ids)
    return successors


def read_num_seqs(attn_metadata: Any) -> int:
    """Return R.

    Raises:
        MetadataError: the host engine passed no attention metadata.
    """
    num_seqs = getattr(attn_metadata, "num_seqs", None)
    if num_seqs is None:
        raise MetadataError(
            "attn_metadata: expected the step's attention metadata with num_seqs, got "
            f"{format_value(attn_metadata)}"
        )
    return int(num_seqs)


def read_step_draft_len(spec_metadata: Any, max_draft_len: int) -> int:
    """Return K of this step: the metadata's ``runtime_draft_len``, or ``max_draft_len``.

    Raises:
        MetadataError: it is no integer, negative or above ``max_draft_len``.
    """
    chosen = getattr(spec_metadata, "runtime_draft_len", None)
    if chosen is None:
        return max_draft_len
    chosen = expect_int("runtime_draft_len", chosen, error=MetadataError)
    if not 0 <= chosen <= max_draft_len:
        raise MetadataError(
            f"runtime_draft_len: expected 0 to max_draft_len ({max_draft_len}), got {chosen}"
        )
    return chosen


def _draft_lens(
    lens: torch.Tensor | Sequence[int] | None,
    layout: StepLayout,
    device: torch.device,
    attn_metadata: AttentionMetadata,
) -> torch.Tensor | None:
    """Return the number of drafts per generation [G] on ``device``; None if all have K.

    A Python list is compared on the CPU, so that the common case launches nothing.
    """
    if lens is None:
        return None
    if isinstance(lens, torch.Tensor):
        return expect_tensor("draft_lens", lens, dtype=INTEGERS)[: layout.num_generations]
    listed = list(lens[: layout.num_generations])
    if len(listed) != layout.num_generations:
        raise MetadataError(
            f"draft_lens: expected one value for each of {layout.num_generations} generations, "
            f"got {listed}"
        )
    if all(length == layout.draft_len for length in listed):
        return None
    if attn_metadata.is_cuda_graph:
        raise MetadataError(
            f"draft_lens: a graph would keep the list {listed} for every replay; expected K = "
            f"{layout.draft_len} everywhere, or a tensor"
        )
    return to_device(listed, torch.int32, device)


def read_layout(
    attn_metadata: Any,
    spec_metadata: Any,
    draft_len: int,
    positions: torch.Tensor | None = None,
) -> StepLayout:
    """Return the layout of a step, from the metadata of a host engine.

    Args:
        draft_len: K of the step.
        positions: [T], if the caller has them.

    Raises:
        MetadataError: positions have another number of rows.
        TensorContractError: counts and tensors do not fit each other.
    """
    contexts = int(attn_metadata.num_contexts)
    chunk_lens = tuple(attn_metadata._seq_lens[:contexts].tolist()) if contexts else ()
    generations = int(attn_metadata.num_seqs) - contexts
    if positions is not None:
        expected = sum(chunk_lens) + generations * (draft_len + 1)
        if positions.shape[0] != expected:
            runtime_len = getattr(spec_metadata, "runtime_draft_len", None)
            raise MetadataError(
                f"step: expected T = {expected} rows, {sum(chunk_lens)} of prompts and K+1 = "
                f"{draft_len + 1} for each of {generations} generations (runtime_draft_len: "
                f"{runtime_len}), got {positions.shape[0]}"
            )
    return StepLayout(
        chunk_lens=chunk_lens,
        num_generations=generations,
        draft_len=draft_len,
        context_lens=attn_metadata.seq_lens_cuda[:contexts],
        positions=positions,
    )


def read_positions(attn_metadata: Any, layout: StepLayout) -> torch.Tensor:
    """Return the position of every row [T] int64, from the KV lengths of the attention metadata.

    Raises:
        MetadataError: it has no ``kv_lens_cuda``.
    """
    kv_lens = getattr(attn_metadata, "kv_lens_cuda", None)
    if kv_lens is None:
        raise MetadataError(
            "this step samples and needs positions: expected position_ids, or kv_lens_cuda in the "
            "attention metadata, got neither"
        )
    requests, device = layout.num_requests, kv_lens.device
    lens = attn_metadata.seq_lens_cuda[:requests].to(torch.int64)
    first_positions = kv_lens[:requests] - lens
    first_rows = lens.cumsum(0) - lens
    size = layout.num_tokens
    offsets = torch.repeat_interleave(first_positions - first_rows, lens, output_size=size)
    return torch.arange(size, device=device) + offsets


def cached_tokens(attn_metadata: Any, num_contexts: int) -> list[int]:
    """Return the number of tokens per context that the KV cache holds before the step.

    Without ``num_cached_tokens_per_seq`` they are read from the device.

    Raises:
        MetadataError: there are contexts, but neither that list nor ``kv_lens_cuda``.
    """
    if num_contexts == 0:
        return []
    params = getattr(attn_metadata, "kv_cache_params", None)
    counts: list[int] | None = getattr(params, "num_cached_tokens_per_seq", None)
    if counts is not None:
        return list(counts[:num_contexts])
    kv_lens = getattr(attn_metadata, "kv_lens_cuda", None)
    if kv_lens is None:
        raise MetadataError(
            "attention metadata: prompts of vanilla MTP need kv_cache_params or kv_lens_cuda, got "
            "neither"
        )
    lens = kv_lens[:num_contexts].cpu() - attn_metadata._seq_lens[:num_contexts].cpu()
    return [int(count) for count in lens]
