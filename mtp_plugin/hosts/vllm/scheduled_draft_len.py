"""The number of drafts of each step, chosen in the scheduler's process.

vLLM captures CUDA graphs for the lengths of ``num_speculative_tokens_per_batch_size``, and its
workers make ``SchedulerOutput.num_spec_tokens_to_schedule`` drafts, which the next step verifies.
`set_schedule` lists every length that may be chosen, and what `lengths_of` returns chooses that of
a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import chain
from typing import Any, Protocol

from mtp_plugin.hosts.vllm.auto_draft_len import AutoDraftLengths
from mtp_plugin.hosts.vllm.options import VllmOptions, read_options
from mtp_plugin.hosts.vllm.tail_gate import TailGate
from mtp_plugin.hosts.vllm.versions import mismatch
from mtp_plugin.speculative.host.signatures import missing_names

Schedule = list[tuple[int, int, int]]
SCHEDULE = "num_speculative_tokens_per_batch_size"
AFTER_SCHEDULE = "vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule"
SCHEDULED = ("vllm.v1.core.sched.output:SchedulerOutput", ("num_spec_tokens_to_schedule",))


class DraftLengths(Protocol):
    """Chooses the number of drafts of every step."""

    def choose(self, scheduled: Any) -> int:
        """Return how many drafts a step makes; called once per step, before its launch.

        Args:
            scheduled: vLLM's ``SchedulerOutput``.
        """

    def record(self, scheduled: Any, output: Any) -> None:
        """Note that the output of a step came just now, in the order of the launches.

        Args:
            scheduled: what `choose` got. output: vLLM's ``ModelRunnerOutput``.
        """


def lengths_of(vllm_config: Any) -> DraftLengths | None:
    """Return what chooses the lengths of an engine; None: vLLM does."""
    options, spec = read_options(vllm_config), vllm_config.speculative_config
    if options is None or spec is None:
        return None
    num_drafts = spec.num_speculative_tokens
    num_mtp = num_drafts - (options.tail.ngram if options.tail is not None else 0)
    lengths = AutoDraftLengths(num_mtp) if options.draft_len is not None else None
    return lengths if options.tail is None else TailGate(num_mtp, num_drafts, lengths)


def lengths_used(options: VllmOptions, num_drafts: int) -> Sequence[int]:
    """Return every number of drafts that a step may make, ascending; empty: vLLM chooses it.

    Args:
        num_drafts: ``num_speculative_tokens``.
    """
    if options.tail is None:
        return () if options.draft_len is None else range(num_drafts + 1)
    num_mtp = num_drafts - options.tail.ngram
    if num_mtp < 1:
        return ()
    return (num_mtp, num_drafts) if options.draft_len is None else (*range(num_mtp + 1), num_drafts)


def schedule_of(lengths: Sequence[int], max_num_seqs: int) -> Schedule:
    """Return a schedule of which vLLM captures graphs for every length.

    Each of the largest batch sizes has a length of its own, as vLLM sizes the graphs of a length by
    the largest batch that has it. The longest has the largest batch; the shortest all others.

    Args:
        lengths: ascending, at most ``max_num_seqs``.

    Returns:
        (first batch size, last batch size, length) of each range.
    """
    first = max_num_seqs - len(lengths) + 1
    ranges = [(first + n, first + n, length) for n, length in enumerate(lengths)]
    return [(1, first, lengths[0]), *ranges[1:]]


def expected_schedule(vllm_config: Any) -> Schedule | None:
    """Return the schedule that an engine needs; None: it needs none, or cannot have it.

    Raises:
        ConfigError: wrong options.
    """
    options, spec = read_options(vllm_config), vllm_config.speculative_config
    if options is None or spec is None:
        return None
    lengths = lengths_used(options, spec.num_speculative_tokens)
    if not lengths or vllm_config.parallel_config.data_parallel_size > 1:
        return None
    most = vllm_config.scheduler_config.max_num_seqs
    return schedule_of(lengths, most) if len(lengths) <= most else None


def set_schedule(vllm_config: Any) -> None:
    """Let vLLM capture graphs for every length, unless the user has a schedule, which
    `checked_settings` refuses.

    Args:
        vllm_config: whose ``__post_init__`` comes next.

    Raises:
        ConfigError: wrong options.
    """
    schedule, spec = expected_schedule(vllm_config), vllm_config.speculative_config
    if schedule and getattr(spec, SCHEDULE, schedule) is None:
        setattr(spec, SCHEDULE, schedule)


def arrange_graphs(manager: Any) -> None:
    """Let vLLM find the graphs of every length, and capture no more than for one of them each.

    vLLM looks for a graph among those with the next larger number of tokens alone, also if these
    are of another length. And it captures the sizes of every length for all others, rounded up.

    Args:
        manager: vLLM's ``CudaGraphManager`` after ``_init_candidates``, changed.
    """
    kept = {
        mode: [desc for desc in descs if _is_kept(desc, descs)]
        for mode, descs in manager._capture_descs.items()
    }
    manager._capture_descs.update(kept)
    manager._candidates.clear()
    for mode in sorted(kept, key=lambda mode: mode.name != "FULL"):  # these come first
        starts: dict[Any, int] = {}
        for desc in sorted(kept[mode], key=lambda desc: desc.num_tokens):
            kind = replace(desc, num_tokens=0, num_reqs=None)
            for num_tokens in range(starts.get(kind, 0), desc.num_tokens + 1):
                found = manager._candidates.setdefault((num_tokens, desc.num_active_loras), [])
                found.append(desc)
            starts[kind] = desc.num_tokens + 1


def _is_kept(desc: Any, descs: list[Any]) -> bool:
    size, each = desc.num_reqs, desc.uniform_token_count
    if each is None or size in (1, 2, 4) or size % (8 if size < 256 else 16) == 0:
        return True
    return bool(size == max(d.num_reqs for d in descs if d.uniform_token_count == each))


def capture_undrafted(
    manager: Any, forward: Callable[..., Any], capture: Callable[..., Any]
) -> dict[Any, Any] | None:
    """Capture the first draft pass also for steps that make no drafts, without the draft head.

    That pass then keeps the KV cache of the draft layers alone; vLLM's graph of it samples a draft
    that is not read.

    Args:
        manager: vLLM's ``SpeculatorCudaGraphManager`` after ``capture``, unchanged.
        forward: what it captured. capture: captures another one.

    Returns:
        all graphs of such steps; None: ``forward`` has no ``skip_sample`` (later passes, vLLM
        0.32), or the manager no batches of one token each, as after a step without drafts.
    """
    kept, graphs = manager._capture_descs, manager.graphs
    of_one = [desc for desc in chain(*kept.values()) if desc.uniform_token_count == 1]
    if not of_one or "skip_sample" not in signature(forward).parameters:
        return None
    manager._capture_descs, manager.graphs = {of_one[0].cg_mode: of_one}, {}
    try:
        capture(partial(forward, skip_sample=True))
        return {**graphs, **manager.graphs}
    finally:
        manager._capture_descs, manager.graphs = kept, graphs


def length_problems(vllm_config: Any, options: VllmOptions) -> list[str]:
    """Return one line for every reason why the lengths of an engine cannot be chosen.

    Args:
        vllm_config: with speculative decoding.
    """
    spec, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    lengths = lengths_used(options, spec.num_speculative_tokens)
    if not lengths:
        return []
    option = "tail" if options.draft_len is None else "draft_len 'auto'"
    problems = []
    given = getattr(spec, SCHEDULE, None)
    if getattr(parallel, "data_parallel_size", 1) > 1:
        problems.append(
            f"{option} is not supported with data_parallel_size "
            f"{parallel.data_parallel_size}, whose ranks must make the same number of drafts: set "
            f"it to 1, or leave out {option.split()[0]}"
        )
    most = vllm_config.scheduler_config.max_num_seqs
    if most < len(lengths):
        problems.append(
            f"{option} with num_speculative_tokens {spec.num_speculative_tokens} needs "
            f"max_num_seqs of {len(lengths)} or more, got {most}"
        )
    if given is not None and [*map(tuple, given)] != schedule_of(lengths, most):
        problems.append(
            f"{option} is not possible with a speculative_config.{SCHEDULE} of your own: "
            "leave out one of them"
        )
    missing = [mismatch(AFTER_SCHEDULE, ("scheduler_output",)), missing_names(*SCHEDULED)]
    if given is None and not problems:
        missing.append(f"VllmConfig has no {SCHEDULE} of the plugin, which was loaded too late")
    return problems + [f"{option} cannot be used, {each}: leave it out" for each in missing if each]
