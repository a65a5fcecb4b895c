"""CUDA graphs of steps: target forward, verification and the whole draft loop."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import is_
from typing import Any

import torch

from mtp_plugin.config import LLMConfig
from mtp_plugin.errors import ConfigError, ExecutorError, MTPPluginError, describe_error
from mtp_plugin.hosts.embedded.prompt_steps import PromptBuffer, PromptChunks
from mtp_plugin.hosts.embedded.row_table import Row, RowTable, StepShape
from mtp_plugin.ops.early_compile import CompileJob
from mtp_plugin.ops.step import SamplingKind
from mtp_plugin.requests.states import CUDA_GRAPH_DUMMY_REQUEST_ID
from mtp_plugin.speculative.plugin import ReplayCheck

_logger = logging.getLogger(__name__)

WARM_UP_STEPS = 2
"""Eager steps before a capture: they compile kernels, initialise libraries and allocate pools."""
CAPTURE_AT_STEP = 4
"""A pending shape is captured at the latest when this many steps needed it."""

GRAPH_BYTES = 4 * 2**20
"""Estimate of what each graph adds: its results, and the driver's copy of its launches."""
LOGIT_BYTES = 10
"""Estimate of the bytes per logit: in the model's dtype, processed, and scratch memory."""
STATE_BYTES = 32
"""Estimate of the bytes per value of a hidden state: a layer's activations."""


def captured_sizes(config: LLMConfig) -> list[int]:
    """Batch sizes of the graphs: as configured, else powers of two and the largest batch."""
    graphs = config.cuda_graph_config
    if graphs is None:
        return []
    if graphs.batch_sizes:
        sizes = set(graphs.batch_sizes)
    else:
        largest = min(graphs.max_batch_size or config.max_batch_size, config.max_batch_size)
        sizes = {1 << i for i in range(largest.bit_length())} | {largest}
    return sorted(size for size in sizes if size <= config.max_batch_size)


def padded_sizes(config: LLMConfig) -> list[int]:
    """Batch sizes to which smaller batches are padded, also on a device without CUDA graphs."""
    graphs = config.cuda_graph_config
    return captured_sizes(config) if graphs is not None and graphs.enable_padding else []


def generation_shapes(
    sizes: Iterable[int], draft_lens: Callable[[range], Sequence[int]], *, padded: bool
) -> list[StepShape]:
    """Return the shapes of generation-only steps that have a graph, the largest batch first.

    Args:
        sizes: see `captured_sizes`.
        draft_lens: batch sizes -> the draft lengths of their steps, ascending.
        padded: whether a size also serves the batches between it and the next smaller size.
    """
    return [
        StepShape((), size, draft_len, sampling_kind)
        for size, smaller in pairwise([*sorted(sizes, reverse=True), 0])
        for draft_len in reversed(draft_lens(range(smaller + 1 if padded else size, size + 1)))
        for sampling_kind in SamplingKind
    ]


def is_captured_first(shape: StepShape, shapes: Iterable[StepShape]) -> bool:
    """Return whether a shape is captured before the executor is ready: that of batches that only
    generate, with the largest draft length, without logits processing."""
    longest = max(s.draft_len for s in shapes if s.num_generations == shape.num_generations)
    is_common = shape.sampling_kind is not SamplingKind.PROCESSED and not shape.chunk_lens
    return is_common and shape.draft_len == longest


def graph_bytes(shapes: Sequence[StepShape], vocab_size: int, hidden_size: int) -> int:
    """Estimate the device memory of the graphs of ``shapes``.

    Graphs share one memory pool, so that only the largest step counts; every graph adds
    `GRAPH_BYTES`.
    """
    largest = 0
    for shape in shapes:
        logit_rows = shape.num_tokens - shape.num_ctx_tokens + shape.num_contexts
        logits = logit_rows * vocab_size * LOGIT_BYTES
        states = shape.num_tokens * hidden_size * STATE_BYTES
        largest = max(largest, logits + states)
    return largest + len(shapes) * GRAPH_BYTES


capture_lock = threading.Lock()
"""Held during a capture, and while another engine thread of the process synchronizes the device:
that would break the capture, as a second capture would."""


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Disable garbage collection: destroying an old graph during a capture breaks the capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class CapturedStep:
    """A graph, and the tensors that its replays write."""

    graph: torch.cuda.CUDAGraph
    outputs: dict[str, Any]  # all but the logits
    spec_metadata: Any  # whose tensors the graph reads
    checks: Sequence[ReplayCheck]  # run after every replay
    prompts: PromptBuffer | None = None


class CapturedSteps:
    """One CUDA graph per step shape, all in one memory pool.

    Shapes are captured at once, or queued: a step of a pending shape runs eagerly, until its graph
    is captured between two steps.

    A replay reads its inputs from the row table (the host's decisions) and from the sampler's store
    (the previous step's tokens).

    Args:
        launch: launches a step (``ModelEngine.launch``).
        table: rows of the steps; its addresses are captured.
        padding_row: fills batches in warm-up and capture.
        previous: the sampler's store; its addresses are captured.
        make_spec_metadata: batch size -> speculative metadata with its own buffers.
        replay_checks: context of a capture; yields the checks to run after each replay.
        pools: returns the tensors that must stay the same objects after capture.
        pool_name: index in ``pools()`` -> name for an error.
    """

    def __init__(
        self,
        launch: Callable[..., dict[str, Any]],
        table: RowTable,
        padding_row: Row,
        previous: Any,
        make_spec_metadata: Callable[[int], Any],
        replay_checks: Callable[[], AbstractContextManager[Sequence[ReplayCheck]]],
        pools: Callable[[], list[torch.Tensor]],
        pool_name: Callable[[int], str],
    ) -> None:
        self._launch = launch
        self._table = table
        self._padding_row = padding_row
        self._previous = previous
        self._make_spec_metadata = make_spec_metadata
        self._replay_checks = replay_checks
        self._pools = pools
        self._pool_name = pool_name
        self._captured_pools: list[torch.Tensor] = []
        self._steps: dict[StepShape, CapturedStep] = {}
        self._pending: dict[StepShape, int] = {}
        """Shapes still to be captured -> how many steps needed them."""
        self._unlisted: set[StepShape] = set()
        """Shapes without drafts that steps needed although :meth:`defer` was not given them."""
        self._compilation: CompileJob | None = None
        self.around_replay: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Context around every graph launch, for timing."""
        self.num_replays = 0
        self.num_prompt_replays = 0
        """Replays of steps with prompts, which `num_replays` includes."""
        self.last_replayed: StepShape | None = None
        """The shape of the newest replay."""
        self.num_bytes = 0
        """Device memory of all graphs together."""

    @property
    def shapes(self) -> list[StepShape]:
        """The shapes that have a graph."""
        return list(self._steps)

    @cached_property
    def _pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        """One stream for all captures, because libraries keep a workspace per stream."""
        return torch.cuda.Stream()

    @torch.inference_mode()
    def launch_padding(self, shapes: Iterable[StepShape]) -> None:
        """Launch steps of padding rows, which write to sentinel slots only."""
        for shape in shapes:
            self._padding_step(shape)[0]()

    @torch.inference_mode()
    def capture(self, shape: StepShape) -> None:
        """Capture a step of padding rows, which writes to sentinel slots only.

        Raises:
            ConfigError: the model or the worker is not graph-safe, or memory is short.
        """
        size = shape.num_contexts + shape.num_generations
        launch, spec_metadata, prompts = self._padding_step(shape)
        try:
            captured = self._record(launch, spec_metadata)
            if not self._steps:
                self._captured_pools = self._pools()
            self._steps[shape] = replace(captured, prompts=prompts)
        except MTPPluginError:
            raise
        except RuntimeError as error:
            raise ConfigError(
                f"cuda_graph_config: a step of {size} requests and {shape.num_ctx_tokens} prompt "
                f"tokens cannot be captured (null: steps run eagerly): {error}"
            ) from error

    def _padding_step(
        self, shape: StepShape
    ) -> tuple[Callable[[], dict[str, Any]], Any, PromptBuffer | None]:
        """Upload padding rows; return a function that launches their step, its metadata and the
        buffer of its prompts."""
        size = shape.num_contexts + shape.num_generations
        step = self._table.upload([self._padding_row] * size)
        prompts = PromptBuffer(shape, step.length.device) if shape.num_contexts else None
        spec_metadata = self._make_spec_metadata(size)
        spec_metadata.request_ids = [CUDA_GRAPH_DUMMY_REQUEST_ID] * size
        spec_metadata.prepare()

        def launch() -> dict[str, Any]:
            contexts, order = (None, None) if prompts is None else prompts.inputs(step)
            return self._launch(
                shape, step, self._previous, contexts, order=order, spec_metadata=spec_metadata
            )

        return launch, spec_metadata, prompts

    @property
    def pending(self) -> list[StepShape]:
        """Step shapes that are still to be captured, in this order."""
        return list(self._pending)

    def defer(self, shapes: Iterable[StepShape], compilation: CompileJob | None = None) -> None:
        """Queue shapes for :meth:`capture_next`.

        Args:
            compilation: of the kernels of logits processing, before which no step with it is
                captured.
        """
        self._pending.update(dict.fromkeys(shapes, 0))
        self._compilation = compilation

    def capture_next(self) -> bool:
        """Capture the first pending shape, between two steps; False: no shape is pending, or its
        kernels are still being compiled."""
        shape = next(iter(self._pending), None)
        if shape is None or self.is_compiling(shape.sampling_kind):
            return False
        self._capture_pending(shape)
        return True

    def is_compiling(self, kind: SamplingKind) -> bool:
        """Whether kernels of steps with this kind of requests are being compiled."""
        job = self._compilation
        return kind is SamplingKind.PROCESSED and job is not None and not job.is_done

    def close(self) -> None:
        """Capture nothing any more."""
        self._pending.clear()
        if self._compilation is not None:
            self._compilation.close()
        self._compilation = None

    def _capture_pending(self, shape: StepShape) -> None:
        """Capture a pending shape; without memory for it, no further graph is captured."""
        if shape.sampling_kind is SamplingKind.PROCESSED and self._compilation is not None:
            self._compilation.wait()
            self._compilation = None
        del self._pending[shape]
        try:
            self.capture(shape)
        except Exception as error:
            _logger.warning(
                "%s; steps of this shape, and of %d shapes that were not captured yet, run eagerly",
                describe_error(error),
                len(self._pending),
            )
            self._pending.clear()

    def _is_unlisted(self, shape: StepShape) -> bool:
        """Whether a shape without drafts is new, and has graphs with drafts."""
        if shape.draft_len > 0 or shape.chunk_lens or shape in self._steps:
            return False
        listed = {*self._steps, *self._pending}
        return shape not in listed | self._unlisted and any(
            replace(each, draft_len=0) == shape for each in listed
        )

    def _record(self, launch: Callable[[], dict[str, Any]], spec_metadata: Any) -> CapturedStep:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_STEPS):
                launch()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # what is collected may shut an engine down, which takes the lock
        with self._replay_checks() as checks, _nothing_collected(), capture_lock:
            torch.cuda.empty_cache()  # memory reserved from here on belongs to the graph
            reserved = torch.cuda.memory_reserved()
            # thread_local: other threads of the process may use the device during the capture
            with torch.cuda.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                capture_error_mode="thread_local",
            ):
                outputs = launch()
                # a replay's logits are not read, and every graph would keep its own
                outputs.pop("logits", None)
            self.num_bytes += torch.cuda.memory_reserved() - reserved
        return CapturedStep(graph, outputs, spec_metadata, checks)

    def replay(
        self, shape: StepShape, rows: list[Row], chunks: PromptChunks | None = None
    ) -> dict[str, Any] | None:
        """Replay the graph of a step shape; None if there is none and the step must run eagerly.

        Args:
            rows: of the batch, padded to the shape.
            chunks: those of a step with prompts, padded likewise.

        Raises:
            MetadataError: in debug mode, if the draft loop left metadata changed.
            ExecutorError: a pool was replaced after capture.
        """
        if self._is_unlisted(shape):
            self._unlisted.add(shape)
            self._pending[shape] = 0
        if shape in self._pending:
            self._pending[shape] += 1
            if self._pending[shape] >= CAPTURE_AT_STEP:
                self._capture_pending(shape)
        captured = self._steps.get(shape)
        if captured is None:
            return None
        pools = self._pools()
        if not all(map(is_, pools, self._captured_pools)):
            replaced = next(
                i for i, pool in enumerate(pools) if pool is not self._captured_pools[i]
            )
            raise ExecutorError(
                f"CUDA graphs: {self._pool_name(replaced)} was replaced after capture, and the "
                "graphs access the captured tensor; write into that one with copy_(), or create a "
                "new LLM"
            )
        self._table.upload(rows)
        if captured.prompts is not None and chunks is not None:
            captured.prompts.upload(chunks)
        with self.around_replay():
            captured.graph.replay()
        self.last_replayed = shape
        self.num_replays += 1
        self.num_prompt_replays += shape.num_contexts > 0
        for check in captured.checks:
            check.verify()
        return captured.outputs
