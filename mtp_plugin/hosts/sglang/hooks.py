"""The functions of SGLang that the plugin hooks, each named above what is called in its place.

Every hook gets the original first (``HookType.AROUND``). Those of `START` are registered when
SGLang loads its plugins, and cannot fail; the others by these, since SGLang only logs a hook that
fails while plugins are loaded, and only in a process that needs them.

Imports the standard library alone, and SGLang and the package where they are needed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

Hook = Callable[..., Any]
_SRT = "sglang.srt"
_SCHEDULER = f"{_SRT}.managers.scheduler"
_TOKENIZER = f"{_SRT}.managers.tokenizer_manager:TokenizerManager"
_RESULTS = f"{_SRT}.managers.scheduler_components"
_WORKER = f"{_SRT}.speculative.eagle_worker_v2:EagleDraftWorker"
_SAMPLER = f"{_SRT}.layers.sampler:Sampler"
_RUNNER = f"{_SRT}.model_executor.model_runner:ModelRunner"
_SPLIT = f"{_SRT}.disaggregation"

START: dict[str, Hook] = {}
"""``module:Class.method`` or ``module:function`` -> what is called in its place."""
FRONT_END: dict[str, Hook] = {}
SCHEDULER: dict[str, Hook] = {}
DRAFTS: dict[str, Hook] = {}
"""For engines with drafts."""
SPLIT: dict[str, Hook] = {}
"""For engines that prefill or decode for others."""

_SETTINGS, _SEEDS = "_mtp_plugin_settings", "_mtp_plugin_seeds"
"""Attributes of SGLang's ``TokenizerManager``."""
_logger = logging.getLogger("sglang.srt.mtp_plugin")
_engine: Any = None
"""`Engine` of this scheduler process."""


def _hooks(table: dict[str, Hook], target: str) -> Callable[[Hook], Hook]:
    """Decorate what is called in place of a function of SGLang, and add it to ``table``."""

    def decorate(hook: Hook) -> Hook:
        table[target] = hook
        return hook

    return decorate


def dotted(target: str) -> str:
    """Return the name that SGLang's registry has for a target."""
    return target.replace(":", ".")


def register_start() -> None:
    """Register the hooks of `START`; SGLang applies them when all plugins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in START.items():
        given = [found[1] for found in HookRegistry._hooks.get(dotted(target), ())]
        # importing the scheduler in the main process would read the environment too early; a
        # scheduler process has imported it
        if hook not in given and (not target.startswith(_SCHEDULER) or _SCHEDULER in sys.modules):
            HookRegistry.register(dotted(target), hook, HookType.AROUND)


def install(table: Mapping[str, Hook]) -> None:
    """Apply hooks now; a repeated call changes nothing.

    Raises:
        HostError: a target is missing, or another plugin hooks it; names all of them.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from mtp_plugin.errors import HostError

    problems = []
    new = {}
    for target, hook in table.items():
        name = dotted(target)
        given = [found[1] for found in HookRegistry._hooks.get(name, ())]
        if hook in given and name in HookRegistry._patched:
            continue
        others = [found for found in given if found is not hook]
        if others or name in HookRegistry._patched or _is_foreign(target):
            owner = getattr(others[0], "__module__", "?") if others else "unknown"
            problems.append(f"{name} is hooked by another plugin ({owner})")
        new[name] = hook
    if not problems:
        for name, hook in new.items():
            HookRegistry.register(name, hook, HookType.AROUND)
        HookRegistry.apply_hooks()  # only logs a target that is missing
        missing = [name for name in new if name not in HookRegistry._patched]
        problems = [f"{name} is missing" for name in missing]
    if problems:
        raise HostError(
            f"mtp_plugin cannot hook SGLang: {'; '.join(problems)}. Leave out the other plugin "
            "(SGLANG_PLUGINS names those to load), install a version of SGLang that fits "
            "(mtp-plugin doctor --host sglang), or unset MTP_PLUGIN_SGLANG"
        )


def _is_foreign(target: str) -> bool:
    """Whether the function that verifies drafts was replaced without SGLang's registry."""
    if target != VERIFY:
        return False
    from importlib import import_module

    module, _, name = target.partition(":")
    found = getattr(import_module(module), name, None)
    return found is not None and getattr(found, "__module__", module) != module


# ---- the main process, and the start of a scheduler


@_hooks(START, f"{_SRT}.server_args:ServerArgs.check_server_args")
def _check_server_args(original: Hook, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse a wrong configuration before a process starts: an error here ends the start."""
    from mtp_plugin.hosts.sglang.engine_checks import checked_settings
    from mtp_plugin.hosts.sglang.versions import expect_fitting

    settings = checked_settings(_resolved(self))
    result = original(self, *args, **kwargs)
    expect_fitting(is_scheduler=False)
    install(FRONT_END)
    _logger.info(
        "mtp_plugin on: front end, verification %(verification)s, %(drafts)s drafts per step, "
        "drafter %(drafter)s",
        settings.summary,
    )
    return result


def _resolved(server_args: Any) -> Any:
    """Return the fields of ``ServerArgs`` that SGLang works with."""
    from mtp_plugin.hosts.sglang.versions import installed

    if not installed().has_raw_arguments:
        return server_args
    from sglang.srt.arg_groups.model_override_base import resolved_view

    return resolved_view(server_args)


@_hooks(FRONT_END, f"{_TOKENIZER}._create_tokenized_object")
def _create_tokenized_object(original: Hook, self: Any, *args: Any, **kwargs: Any) -> Any:
    from mtp_plugin.hosts.sglang.requests import request_problem

    settings = _settings_of(self)
    made = original(self, *args, **kwargs)
    problem = request_problem(made, settings)
    if problem is not None:
        raise ValueError(problem)  # HTTP 400
    return made


@_hooks(FRONT_END, f"{_TOKENIZER}._send_one_request")
def _send_one_request(original: Hook, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    from mtp_plugin.hosts.sglang.requests import OutputSeeds

    seeds = vars(self).get(_SEEDS)
    if seeds is None:
        seeds = vars(self)[_SEEDS] = OutputSeeds()
    seeds.separate(request)
    return original(self, request, *args, **kwargs)


def _settings_of(manager: Any) -> Any:
    """Return the settings of the engine of a ``TokenizerManager``, read once."""
    from mtp_plugin.hosts.sglang.engine_checks import checked_settings

    settings = vars(manager).get(_SETTINGS)
    if settings is None:
        settings = vars(manager)[_SETTINGS] = checked_settings(_resolved(manager.server_args))
    return settings


@_hooks(FRONT_END, f"{_TOKENIZER}._calculate_spec_decoding_metrics")
def _spec_metrics(
    original: Hook, self: Any, meta_info: Any, recv_obj: Any, i: int, *args: Any, **kwargs: Any
) -> Any:
    """Count the drafts that a finished request could accept as proposed, in place of K a step."""
    from mtp_plugin.speculative.rows.request_options import read_request

    result = original(self, meta_info, recv_obj, i, *args, **kwargs)
    given = self.rid_to_state[recv_obj.rids[i]].obj.sampling_params or {}
    given = {**(self.preferred_sampling_params or {}), **given}.get("custom_params")
    if given and meta_info.get("spec_num_proposed_drafts"):
        limit = read_request(given, _settings_of(self)).draft_limit
        if limit:
            proposed = meta_info["spec_verify_ct"] * limit
            for name in {"spec_num_proposed_drafts", "spec_proposed_drafts"} & meta_info.keys():
                meta_info[name] = proposed
            meta_info["spec_accept_rate"] = meta_info["spec_num_correct_drafts"] / proposed
    return result


@_hooks(START, f"{_SCHEDULER}:Scheduler.__init__")
def _scheduler_init(original: Hook, self: Any, server_args: Any, *args: Any, **kwargs: Any) -> Any:
    global _engine
    from mtp_plugin.hosts.sglang.engine import Engine
    from mtp_plugin.hosts.sglang.engine_checks import checked_settings, expect_equal_ranks
    from mtp_plugin.hosts.sglang.split import expect_free_words
    from mtp_plugin.hosts.sglang.versions import data_parallel_rank, expect_fitting

    arguments = _resolved(server_args)
    settings = checked_settings(arguments)
    expect_fitting(is_scheduler=True)
    _engine = Engine(settings)
    install(SCHEDULER)
    if settings.num_drafts:
        install(DRAFTS)
    is_split = arguments.disaggregation_mode != "null"
    if is_split:
        install(SPLIT)
    original(self, server_args, *args, **kwargs)
    _engine.expect_attached()
    if is_split:
        expect_free_words(self.disagg_metadata_buffers)
    # the seed of the first rank: each node has one of its own
    _engine.seed_from(self.random_seed, *data_parallel_rank(self))
    model = arguments.served_model_name if arguments.enable_metrics else None
    _engine.count_drafts(model, is_first_rank=self.dp_tp_group.rank_in_group == 0)
    _engine.warm_up()
    expect_equal_ranks(self.tp_group, settings, self.random_seed)
    _logger.info("mtp_plugin on: %s", _engine.summary)


@_hooks(SCHEDULER, f"{_SCHEDULER}:Scheduler.set_internal_state")
def _set_internal_state(original: Hook, self: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse what is refused at the start, as SGLang refuses other changes."""
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    from mtp_plugin.hosts.sglang.engine_checks import field_problems

    problems = field_problems(recv_req.server_args)
    if problems:
        _logger.error("mtp_plugin refuses the new state: %s", "; ".join(problems))
        return SetInternalStateReqOutput(updated=False)
    return original(self, recv_req, *args, **kwargs)


# ---- requests


@_hooks(SCHEDULER, f"{_SCHEDULER}:Scheduler._add_request_to_queue")
def _add_request(original: Hook, self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    problem = _engine.admit(req)
    if problem is not None:
        req.set_finish_with_abort(problem)  # HTTP 400, where the front end does not check
    return original(self, req, *args, **kwargs)


@_hooks(SCHEDULER, f"{_SRT}.mem_cache.memory_pool:ReqToTokenPool.alloc")
def _alloc_slots(original: Hook, self: Any, reqs: Any, *args: Any, **kwargs: Any) -> Any:
    new = [req for req in reqs if not _engine.has_row(req)]
    result = original(self, reqs, *args, **kwargs)
    if result is not None:
        for req in new:
            _engine.stage(req)
    return result


@_hooks(
    SPLIT,
    f"{_SPLIT}.decode_schedule_batch_mixin:ScheduleBatchDisaggregationDecodeMixin"
    ".prepare_for_prebuilt",
)
def _prepare_for_prebuilt(original: Hook, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stage requests that another engine prefilled, with their first token: slots are given out
    before it is there, and by another class of pools."""
    result = original(self, *args, **kwargs)
    for req in self.reqs:
        _engine.stage(req)
    return result


@_hooks(SPLIT, f"{_SPLIT}.utils:MetadataBuffers.set_buf")
def _set_buffer(original: Hook, self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    from mtp_plugin.hosts.sglang.split import write_mark

    result = original(self, req, *args, **kwargs)
    write_mark(self.output_ids[req.metadata_buffer_index], req, _engine.settings)
    return result


@_hooks(SPLIT, f"{_SPLIT}.decode:DecodeTransferQueue._commit_transfer_to_req")
def _commit_transfer(original: Hook, self: Any, decode_req: Any, *args: Any, **kwargs: Any) -> Any:
    """End a request whose first token is not ours, as SGLang ends one with another's metadata."""
    from sglang.srt.disaggregation.utils import prepare_abort

    from mtp_plugin.hosts.sglang.split import is_fake, take_mark

    req, problem = decode_req.req, None
    if not is_fake(req, self.scheduler.server_args.disaggregation_transfer_backend):
        row = self.metadata_buffers.output_ids[decode_req.metadata_buffer_index]
        problem = take_mark(row, req, _engine.settings)
    if problem is None:
        return original(self, decode_req, *args, **kwargs)
    _logger.error("request %s ends with an error: %s", req.rid, problem)
    prepare_abort(req, problem, status_code=500)
    decode_req.kv_receiver.clear()
    decode_req.kv_receiver = None
    return None


@_hooks(SPLIT, f"{_SRT}.managers.schedule_batch:Req.build_rebootstrap_payload")
def _rebootstrap_payload(original: Hook, self: Any, *args: Any, **kwargs: Any) -> Any:
    from mtp_plugin.hosts.sglang.split import own_parameters

    payload = original(self, *args, **kwargs)
    payload["sampling_params"] |= own_parameters(self)
    return payload


@_hooks(SCHEDULER, f"{_SRT}.managers.tp_worker:TpModelWorker.alloc_memory_pool")
def _alloc_memory_pool(original: Hook, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Make the slot table when the number of slots is known, before graphs are captured."""
    result = original(self, *args, **kwargs)
    if not self.is_draft_worker:
        _engine.attach(self.model_runner)
    return result


# ---- sampling


@_hooks(SCHEDULER, f"{_RUNNER}.sample")
def _sample(
    original: Hook, self: Any, logits_output: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    if forward_batch.forward_mode.is_idle():
        return original(self, logits_output, forward_batch, *args, **kwargs)
    with _engine.sampling(logits_output, forward_batch):
        tokens = original(self, logits_output, forward_batch, *args, **kwargs)
    _engine.keep_status(logits_output)
    _engine.follow(tokens, forward_batch)
    return tokens


@_hooks(SCHEDULER, f"{_SAMPLER}.forward")
def _sampler_forward(
    original: Hook,
    self: Any,
    logits_output: Any,
    sampling_info: Any,
    return_logprob: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    wants_probs = return_logprob or any(sampling_info.return_sampling_masks or ())
    if not _engine.is_sampling or wants_probs:
        return original(self, logits_output, sampling_info, return_logprob, *args, **kwargs)
    # without SGLang's softmax, which nothing reads
    self._preprocess_logits(logits_output.next_token_logits, sampling_info)
    tokens = _engine.take_sampled()
    self._sync_token_ids_across_tp(tokens, sampling_info)
    return tokens


@_hooks(SCHEDULER, f"{_SAMPLER}._preprocess_logits")
def _preprocess_logits(
    original: Hook, self: Any, logits: Any, sampling_info: Any, *args: Any, **kwargs: Any
) -> Any:
    """Sample before SGLang turns the logits into probabilities, whose rounding depends on K."""
    result = original(self, logits, sampling_info, *args, **kwargs)
    if _engine.is_sampling:
        _engine.sample(result)
    return result


_SAMPLE = f"{_SAMPLER}._sample_from_probs"


@_hooks(SCHEDULER, _SAMPLE)
def _sample_from_probs(original: Hook, self: Any, *args: Any, **kwargs: Any) -> Any:
    from mtp_plugin.hosts.sglang.versions import installed

    tokens = _engine.take_sampled()
    if tokens is None:
        return original(self, *args, **kwargs)
    _expect_defaults(_SAMPLE, original, (self, *args), kwargs)
    return (tokens, None) if installed().samples_pairs else tokens


def _expect_defaults(
    target: str,
    original: Hook,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    unused: tuple[str, ...] = (),
) -> None:
    """Raise `HostError` if a replaced function is called with what its hook does not know."""
    from mtp_plugin.errors import HostError
    from mtp_plugin.hosts.sglang.versions import SIGNATURES
    from mtp_plugin.speculative.host.signatures import changed_arguments

    owner = ("self",) if "." in target.partition(":")[2] else ()
    changed = changed_arguments(original, (*owner, *SIGNATURES[target]), args, kwargs)
    unknown = [name for name in changed if name not in unused]
    if unknown:
        raise HostError(
            f"mtp_plugin does not know the arguments {', '.join(unknown)} of {dotted(target)}: "
            "leave out the option of SGLang that gives them, or unset MTP_PLUGIN_SGLANG"
        )


@_hooks(SCHEDULER, f"{_SCHEDULER}:Scheduler.process_batch_result")
def _process_result(
    original: Hook, self: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
) -> Any:
    from mtp_plugin.hosts.sglang.results import end_failed

    end_failed(batch, result)
    return original(self, batch, result, *args, **kwargs)


# ---- drafts


@_hooks(
    DRAFTS,
    f"{_RESULTS}.batch_result_processor:SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
)
def _resolve_tokens(
    original: Hook, self: Any, result: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    from mtp_plugin.hosts.sglang.results import live_requests

    live = live_requests(batch)  # a grammar may end one
    tokens = original(self, result, batch, *args, **kwargs)
    _engine.counts.add(live, batch, result)
    return tokens


@_hooks(DRAFTS, f"{_RESULTS}.metrics_reporter:SchedulerMetricsReporter.update_spec_metrics")
def _update_metrics(
    original: Hook, self: Any, bs: Any, num_correct_drafts: int, *args: Any, **kwargs: Any
) -> Any:
    from mtp_plugin.hosts.sglang.versions import installed

    requests, accepted = _engine.counts.without_limited(bs, num_correct_drafts)
    if installed().counts_tokens:
        kwargs["num_accept_tokens"] = requests + accepted
    else:  # it counts generated tokens, too
        self.num_generated_tokens += num_correct_drafts - accepted
    return original(self, requests, accepted, *args, **kwargs)


@_hooks(DRAFTS, f"{_SRT}.managers.schedule_batch:Req.update_finish_state")
def _update_finish_state(
    original: Hook, self: Any, new_accepted_len: int = 1, *args: Any, **kwargs: Any
) -> Any:
    """End a request where it ends without drafts: SGLang looks for the limit, then stop strings,
    then stop tokens, in all tokens of a step at once."""
    from mtp_plugin.hosts.sglang.results import has_ordered_ends, one_by_one

    if new_accepted_len <= 1 or not has_ordered_ends(self):
        return original(self, new_accepted_len, *args, **kwargs)
    for _ in one_by_one(self, new_accepted_len):
        original(self, 1, *args, **kwargs)
    return None


VERIFY = f"{_SRT}.speculative.eagle_utils:eagle_sample"


@_hooks(DRAFTS, VERIFY)
def _eagle_sample(
    original: Hook,
    verify_input: Any,
    batch: Any,
    logits_output: Any,
    grammar_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if batch.forward_mode.is_idle():
        return original(verify_input, batch, logits_output, grammar_mask, *args, **kwargs)
    given = (verify_input, batch, logits_output, grammar_mask, *args)
    # which nothing reads without a watermark_state
    _expect_defaults(VERIFY, original, given, kwargs, unused=("watermark_full_mask",))
    return _engine.verify(verify_input, batch, logits_output, grammar_mask)


@_hooks(DRAFTS, f"{_WORKER}.alloc_memory_pool")
def _alloc_draft_pool(original: Hook, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    _engine.drafts_from(self)
    return result


@_hooks(DRAFTS, f"{_WORKER}.draft")
def _draft(original: Hook, self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    if not batch.forward_mode.is_idle():
        _engine.apply()  # a request that another engine prefilled begins here
    return original(self, batch, *args, **kwargs)


@_hooks(DRAFTS, f"{_WORKER}.draft_forward")
def _draft_forward(original: Hook, self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    with _engine.drafting(self.draft_runner, forward_batch):
        return original(self, forward_batch, *args, **kwargs)


@_hooks(DRAFTS, f"{_RUNNER}.forward")
def _forward(original: Hook, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    _engine.after_forward(self, result.logits_output)
    return result


@_hooks(
    DRAFTS,
    f"{_SRT}.speculative.eagle_draft_extend_cuda_graph_runner:EAGLEDraftExtendCudaGraphRunner"
    ".execute",
)
def _extend_graph(original: Hook, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    _engine.after_forward(self.model_runner, result)
    return result


@_hooks(DRAFTS, f"{_WORKER}._draft_extend_for_prefill")
def _extend_for_prefill(original: Hook, self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    with _engine.extending(self.draft_runner) as kept:
        draft_input = original(self, batch, *args, **kwargs)
    _engine.first_drafts(kept, draft_input, batch, batch.seq_lens)
    return draft_input


@_hooks(DRAFTS, f"{_WORKER}._draft_extend_for_decode")
def _extend_for_decode(
    original: Hook, self: Any, batch: Any, batch_result: Any, *args: Any, **kwargs: Any
) -> Any:
    with _engine.extending(self.draft_runner) as kept:
        result = original(self, batch, batch_result, *args, **kwargs)
    _engine.first_drafts(kept, batch_result.next_draft_input, batch, batch_result.new_seq_lens)
    return result
