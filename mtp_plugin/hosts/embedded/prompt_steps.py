"""Prompt chunks of a step: from the host to the device, and the padded shapes of captured steps.

A captured step has C chunks and T prompt tokens whatever the batch; the lengths of the chunks are
read on the device, so that one graph serves every division of its tokens. Missing chunks are
padding: they have the tokens that are left, at least one each, and write to sentinel slots only.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from typing_extensions import Self

from mtp_plugin.config import LLMConfig
from mtp_plugin.hosts.embedded.request import LlmRequest
from mtp_plugin.hosts.embedded.row_table import StepShape, UploadedRows
from mtp_plugin.hosts.embedded.step_inputs import StepInputs
from mtp_plugin.ops.step import SamplingKind, to_device

CAPTURED_CHUNKS = 8
"""C of captured steps, at least one of them padding unless all tokens are used."""
PROMPT_TOKENS = (64, 128, 256, 512, 1024)
"""Default numbers of prompt tokens for which steps are captured."""
SMALLER_BATCHES = 4
"""Batch sizes of captured steps with prompts differ by this factor, so that there are few."""
SMALLER_BATCHES_OF_LONG_CHUNKS = 2
"""The same for steps with the most prompt tokens, whose time grows with every padding row."""


class PromptChunks(NamedTuple):
    """C prompt chunks with T tokens together, on the host."""

    ids: list[int]  # [T]
    positions: list[int]  # [T]
    next_prompt: list[int]  # [C] the token after the chunk, -1: the chunk ends its prompt
    lens: list[int]  # [C]
    order: Sequence[int] = ()  # [R] of a captured step: rows of the batch, then padding

    @classmethod
    def of(cls, requests: Sequence[LlmRequest]) -> Self:
        """Return the scheduled chunks of these requests."""
        chunks = cls([], [], [], [])
        for request in requests:
            start = request.context_current_position
            end = start + request.context_chunk_size
            tokens = request.get_tokens()
            chunks.ids.extend(tokens[start:end])
            chunks.positions.extend(range(start, end))
            chunks.next_prompt.append(-1 if request.is_last_context_chunk else tokens[end])
            chunks.lens.append(end - start)
        return chunks

    def padded(self, shape: StepShape, num_generations: int) -> Self:
        """Return the chunks of a captured step of ``shape`` that has so many real generations."""
        num_chunks = len(self.lens)
        missing = shape.num_contexts - num_chunks
        spare = shape.num_ctx_tokens - len(self.ids)
        lens = [1] * (missing - 1) + [spare - missing + 1] if missing else []
        real = [*range(num_chunks)]
        real += range(shape.num_contexts, shape.num_contexts + num_generations)
        padding = [*range(num_chunks, shape.num_contexts)]
        padding += range(
            shape.num_contexts + num_generations, shape.num_contexts + shape.num_generations
        )
        return self._replace(
            ids=self.ids + [0] * spare,
            positions=self.positions + [0] * spare,
            next_prompt=self.next_prompt + [-1] * missing,
            lens=self.lens + lens,
            order=real + padding,
        )

    def flat(self) -> torch.Tensor:
        """Return all values in one int32 tensor, which :func:`context_inputs` takes apart again."""
        values = array("i")
        for part in (*self, self.last_rows):
            values.fromlist([*part])
        return torch.frombuffer(values, dtype=torch.int32)  # a quarter of torch.tensor's time

    @property
    def last_rows(self) -> list[int]:
        """[C] index of each chunk's last token."""
        return [end - 1 for end in accumulate(self.lens)]

    def sizes(self) -> list[int]:
        """Return the number of values of each part of :meth:`flat`."""
        return [*map(len, self), len(self.lens)]

    def to_inputs(self, step: UploadedRows) -> StepInputs:
        """Return the chunks on the device; ``step`` has their rows first."""
        values = to_device(self.flat(), torch.int32, step.length.device)  # one copy
        return context_inputs(values, self.sizes(), step)[0]


def context_inputs(
    values: torch.Tensor, sizes: Sequence[int], step: UploadedRows
) -> tuple[StepInputs, torch.Tensor]:
    """Return the inputs of prompt chunks from :meth:`PromptChunks.flat`, and the order of rows.

    Args:
        values: [sum(sizes)] int32.
        step: the step's rows, those of the chunks first.
    """
    ids, positions, next_prompt, lens, order, last_rows = values.split(list(sizes))
    chunks = slice(0, lens.shape[0])
    length, capacity = step.length[chunks], step.capacity[chunks]
    none = values[:0]
    inputs = StepInputs(
        input_ids=ids,
        positions=positions.to(torch.int64),
        seq_lens=lens,
        kv_lens=length,
        # of a padding chunk, which may use no KV rows: 0
        write_limit=torch.minimum(length, capacity),
        capacity=capacity,
        draft_tokens=none,
        draft_lens=none,
        state_slot=step.state_slot[chunks].to(torch.int64),
        next_prompt=next_prompt,
        last_rows=last_rows.to(torch.int64),
    )
    return inputs, order.to(torch.int64)


class PromptBuffer:
    """Device buffer with the chunks of a captured step."""

    def __init__(self, shape: StepShape, device: torch.device) -> None:
        lens = list(shape.chunk_lens)
        zeros = [0] * shape.num_ctx_tokens
        order = list(range(shape.num_contexts + shape.num_generations))
        chunks = PromptChunks(zeros, zeros, [-1] * len(lens), lens, order)
        self._sizes = chunks.sizes()
        self._values = to_device(chunks.flat(), torch.int32, device)

    def inputs(self, step: UploadedRows) -> tuple[StepInputs, torch.Tensor]:
        """See :func:`context_inputs`; reads the buffer when the step runs."""
        return context_inputs(self._values, self._sizes, step)

    def upload(self, chunks: PromptChunks) -> None:
        """Start the copy of a step's chunks, padded to the captured shape."""
        self._values.copy_(to_device(chunks.flat(), torch.int32, self._values.device))


def prompt_token_sizes(config: LLMConfig) -> list[int]:
    """Numbers of prompt tokens for which steps are captured, ascending."""
    graphs = config.cuda_graph_config
    if graphs is None or not graphs.enable_padding:
        return []
    sizes = PROMPT_TOKENS if graphs.prompt_tokens is None else graphs.prompt_tokens
    return sorted({size for size in sizes if size <= config.max_num_tokens})


def prompt_shapes(
    token_sizes: Iterable[int], generation_shapes: Sequence[StepShape]
) -> list[StepShape]:
    """Return the shapes of captured steps with prompts.

    With generations they are captured for the largest batch, a quarter of it and so on (a half,
    with the most prompt tokens), and the largest draft length of each.

    Args:
        token_sizes: prompt tokens of a step.
        generation_shapes: those of generation-only steps.
    """
    draft_lens: dict[int, int] = {}
    for shape in generation_shapes:
        size = shape.num_generations
        draft_lens[size] = max(shape.draft_len, draft_lens.get(size, 0))
    token_sizes = list(token_sizes)
    if not draft_lens or not token_sizes:
        return []
    few = _spaced_sizes(draft_lens, SMALLER_BATCHES)
    many = _spaced_sizes(draft_lens, SMALLER_BATCHES_OF_LONG_CHUNKS)
    most = max(token_sizes)
    # every padding chunk has a token
    return [
        StepShape(
            (tokens + 1,) + (1,) * (CAPTURED_CHUNKS - 1),
            size,
            draft_lens[size or min(draft_lens)],
            kind,
        )
        for kind in SamplingKind
        for size in (0, *many)
        for tokens in token_sizes
        if tokens == most or size in (0, *few)
    ]


def _spaced_sizes(sizes: Collection[int], factor: int) -> list[int]:
    """Return the largest of ``sizes`` and those that serve it divided by powers of ``factor``."""
    spaced: dict[int, None] = {}
    wanted = max(sizes)
    while wanted >= 1:
        spaced[min(size for size in sizes if size >= wanted)] = None
        wanted //= factor
    return list(spaced)


def distinct_shapes(shapes: Sequence[StepShape]) -> list[StepShape]:
    """Return shapes that launch every kernel of ``shapes``.

    Of those with prompts these are the ones with the fewest and the most tokens and generations.
    """
    prompts = [shape for shape in shapes if shape.chunk_lens]
    tokens = sorted({shape.num_ctx_tokens for shape in prompts})
    batches = sorted({shape.num_generations for shape in prompts})
    return [
        shape
        for shape in shapes
        if not shape.chunk_lens
        or (
            shape.num_ctx_tokens in (tokens[0], tokens[-1])
            and shape.num_generations in (batches[0], batches[-1])
        )
    ]


def fitting_shape(step: StepShape, shapes: Iterable[StepShape]) -> StepShape | None:
    """Return the smallest of ``shapes`` that serves a step with prompts; None: none does."""

    def fits(shape: StepShape) -> bool:
        missing = shape.num_contexts - step.num_contexts
        spare = shape.num_ctx_tokens - step.num_ctx_tokens
        return (
            (shape.draft_len, shape.sampling_kind) == (step.draft_len, step.sampling_kind)
            and shape.num_generations >= step.num_generations
            and missing >= 0
            and (spare >= missing if missing else spare == 0)
        )

    return min(filter(fits, shapes), key=lambda shape: shape.num_tokens, default=None)
