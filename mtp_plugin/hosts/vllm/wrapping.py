"""The methods of vLLM that the plugin wraps, each named above the function that takes its place.

Every function gets the original first, and returns its result for an engine without
``additional_config.mtp_plugin``; it imports nothing of ours then. Methods of `START`, `FRONT_END`
and `DRAFT_LENGTHS` are wrapped in every process; the others only when a worker of an engine with
the plugin starts, so that front ends never import our ops.

Imports the standard library alone: vLLM only logs a plugin that fails to import.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import re
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from importlib import import_module
from typing import Any

Method = Callable[..., Any]
START: dict[str, Method] = {}
"""``module:Class.method`` -> what is called in its place, with the original as first argument."""
FRONT_END: dict[str, Method] = {}
"""Metrics alone: an engine runs without it."""
DRAFT_LENGTHS: dict[str, Method] = {}
"""For an engine whose numbers of drafts the plugin chooses, which checks that there are these."""
WORKER: dict[str, Method] = {}
TAIL: dict[str, Method] = {}
"""For a tail of copied text, which checks that there are these."""
GRAPHS: dict[str, Method] = {}
"""For an engine whose numbers of drafts the plugin chooses."""
DSPARK: dict[str, Method] = {}
"""For DSpark drafts, whose module is imported for these alone."""
NEW_WEIGHTS: dict[str, Method] = {}
"""Not all versions have all of them."""

_logger = logging.getLogger("vllm.mtp_plugin")
_KEY = "mtp_plugin"
_IS_WRAPPED = "_mtp_plugin_is_wrapped"
_ENGINE = "_mtp_plugin_engine"
_COUNTER = "_mtp_plugin_counter"
LENGTHS = "_mtp_plugin_draft_lengths"
_ADMISSION = "_mtp_plugin_admission"
UNDRAFTED = "_mtp_plugin_undrafted"
"""Attribute of vLLM's manager of the first draft pass: its graphs for steps without drafts."""
_SERVES_ALL: ContextVar[bool] = ContextVar("mtp_plugin_serves_all", default=False)
"""Whether the request that is validated belongs to an engine with the plugin."""
_WORKER_INIT = "vllm.v1.worker.worker_base:WorkerBase.__init__"
_GPU = "vllm.v1.worker.gpu"
_DRAFTS = f"{_GPU}.spec_decode.speculator:DraftModelSpeculator"
_OF_TARGET = f"{_GPU}.spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator"
_DRAFT_GRAPHS = f"{_GPU}.spec_decode.target_dependent_ar.cudagraph_utils:SpeculatorCudaGraphManager"


def wrap_start() -> None:
    """Wrap the methods of `START`; a repeated call changes nothing.

    A method that is missing in this vLLM is left out: an engine without the plugin must not notice,
    and one with it fails when its worker starts. Only if that could not be noticed either, this is
    logged.
    """
    missing = _wrap_all(START)
    for table in (FRONT_END, DRAFT_LENGTHS):
        _wrap_all(table)
    if _WORKER_INIT in missing:
        _logger.warning("mtp_plugin cannot be used with this vLLM: %s", missing[_WORKER_INIT])


def wrap_worker() -> None:
    """Wrap the methods of `WORKER`, which `expect_fitting` found, and those of `GRAPHS`, `TAIL` and
    `NEW_WEIGHTS` that there are; a repeated call changes nothing."""
    for table in (WORKER, GRAPHS, TAIL, NEW_WEIGHTS):
        _wrap_all(table)


def _wraps(table: dict[str, Method], target: str) -> Callable[[Method], Method]:
    """Decorate what is called in place of a method of vLLM, and add it to ``table``."""

    def decorate(function: Method) -> Method:
        table[target] = function
        return function

    return decorate


@_wraps(START, _WORKER_INIT)
def _worker_init(original: Method, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    settings = _settings(vllm_config)
    if settings is not None:
        from mtp_plugin.hosts.vllm.versions import expect_fitting

        expect_fitting(settings.drafter)
        wrap_worker()
        if settings.drafter == "dspark":
            _wrap_all(DSPARK)
        _warn(*args, **kwargs)
        _compile_early(vllm_config, *args, **kwargs)
    return original(self, vllm_config, *args, **kwargs)


def _warn(_local_rank: int = 0, rank: int = 0, *_args: Any, **_kwargs: Any) -> None:
    from mtp_plugin.hosts.vllm.engine_checks import start_warnings

    for warning in start_warnings() if rank == 0 else ():
        _logger.warning("%s", warning)


def _compile_early(vllm_config: Any, local_rank: int = 0, *_args: Any, **_kwargs: Any) -> None:
    from vllm.platforms import current_platform

    settings = _settings(vllm_config)
    if not current_platform.is_cuda() or settings.options.kernels == "reference":
        return
    from mtp_plugin.hosts.vllm.early_kernels import start

    capability = current_platform.get_device_capability().to_int()
    start(vllm_config, settings, capability, is_first_rank=local_rank == 0)


@_wraps(DRAFT_LENGTHS, "vllm.config.vllm:VllmConfig.__post_init__")
def _config_post_init(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    if _is_on(self):
        from mtp_plugin.errors import ConfigError
        from mtp_plugin.hosts.vllm.scheduled_draft_len import set_schedule

        with contextlib.suppress(ConfigError):  # the engine's checks raise it, with all others
            set_schedule(self)
    return original(self, *args, **kwargs)


@_wraps(START, "vllm.v1.engine.input_processor:InputProcessor.__init__")
def _input_processor_init(
    original: Method, self: Any, vllm_config: Any, *args: Any, **kwargs: Any
) -> Any:
    extra = getattr(vllm_config, "additional_config", None)
    for key in misspelt_keys(extra):
        state = "which stays on" if _is_on(vllm_config) else "which is off"
        _logger.warning(
            "additional_config: the key %r does not change mtp_plugin, %s: the key is %r",
            *(key, state, _KEY),
        )
    settings = _settings(vllm_config)
    setattr(self, _ADMISSION, settings)
    if settings is not None:
        _logger.info(
            "mtp_plugin on: front end, verification %(verification)s, %(drafts)s drafts per "
            "step, drafter %(drafter)s",
            settings.summary,
        )
    return original(self, vllm_config, *args, **kwargs)


@_wraps(START, "vllm.v1.engine.input_processor:InputProcessor._validate_params")
def _validate_params(original: Method, self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
    settings = getattr(self, _ADMISSION, None)
    if settings is not None:
        from mtp_plugin.hosts.vllm.requests import check_request

        check_request(params, settings)
    token = _SERVES_ALL.set(settings is not None)
    try:
        return original(self, params, *args, **kwargs)
    finally:
        _SERVES_ALL.reset(token)


@_wraps(START, "vllm.sampling_params:SamplingParams._validate_spec_decode")
def _validate_spec_decode(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Let min_p and logit_bias pass, which vLLM refuses with drafts."""
    if not _SERVES_ALL.get():
        return original(self, *args, **kwargs)
    others = copy.copy(self)
    others.min_p, others.logit_bias = 0.0, None
    return original(others, *args, **kwargs)


@_wraps(START, "vllm.v1.engine.core:EngineCore.preprocess_add_request")
def _preprocess_add_request(
    original: Method, self: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Every front end's requests come here, also those of other languages or without the plugin."""
    settings = _kept(self, _ADMISSION, _settings)
    if settings is not None:
        from mtp_plugin.hosts.vllm.requests import check_request

        check_request(request.sampling_params, settings)
    return original(self, request, *args, **kwargs)


@_wraps(START, "vllm.v1.engine.core:EngineCoreProc._handle_request_preproc_error")
def _handle_preproc_error(
    original: Method, self: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Log one line in place of a traceback: versions before 0.33 do not expect wrong requests."""
    if not _is_on(self.vllm_config):
        return original(self, request, *args, **kwargs)
    from vllm.exceptions import VLLMValidationError

    from mtp_plugin.errors import one_line

    error = sys.exc_info()[1]
    if not isinstance(error, VLLMValidationError):
        return original(self, request, *args, **kwargs)
    _logger.warning("request %s is refused: %s", one_line(request.request_id), one_line(error))
    self._send_error_outputs_to_client([request.request_id], request.client_index)
    return None


@_wraps(START, "vllm.v1.core.sched.scheduler:Scheduler.add_request")
def _add_scheduled_request(
    original: Method, self: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    counter = _kept(self, _COUNTER, _counter_of)
    if counter is not None:
        counter.add(request)
    return original(self, request, *args, **kwargs)


@_wraps(DRAFT_LENGTHS, "vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule")
def _update_after_schedule(
    original: Method, self: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    lengths = _kept(self, LENGTHS, _lengths_of)
    if lengths is not None:
        scheduler_output.num_spec_tokens_to_schedule = lengths.choose(scheduler_output)
    return original(self, scheduler_output, *args, **kwargs)


@_wraps(START, "vllm.v1.core.sched.scheduler:Scheduler.update_from_output")
def _update_from_output(
    original: Method,
    self: Any,
    scheduler_output: Any,
    model_runner_output: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    counter = _kept(self, _COUNTER, _counter_of)
    given = (scheduler_output, model_runner_output, *args)
    lengths = _kept(self, LENGTHS, _lengths_of)
    if lengths is not None:
        lengths.record(scheduler_output, model_runner_output)
    withheld = counter and counter.correct(self.requests, *given[:2])
    if not withheld:
        return original(self, *given, **kwargs)
    make = self.make_spec_decoding_stats

    def make_of_others(stats: Any, **named: Any) -> Any:
        return stats if named["request_id"] in withheld else make(stats, **named)

    self.make_spec_decoding_stats = make_of_others
    try:
        return original(self, *given, **kwargs)
    finally:
        del self.make_spec_decoding_stats


@_wraps(FRONT_END, "vllm.v1.metrics.loggers:PrometheusStatLogger.__init__")
def _prometheus_init(
    original: Method, self: Any, vllm_config: Any, *args: Any, **kwargs: Any
) -> Any:
    original(self, vllm_config, *args, **kwargs)
    if _is_on(vllm_config):
        from mtp_plugin.hosts.vllm import metrics

        for add in (metrics.add_alarm_metric, metrics.add_info_metric, metrics.add_length_metric):
            try:
                add(self, vllm_config)
            except Exception as error:  # metrics never end an engine
                _logger.warning("%s: %s: metric left out", type(error).__name__, error)


@_wraps(WORKER, f"{_GPU}.model_runner:GPUModelRunner.load_model")
def _load_model(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    if self.is_last_pp_rank and _is_on(self.vllm_config):
        engine = getattr(self.model_state, _ENGINE, None)
        if engine is None or self.sampler is not engine.sampler:
            raise _own_sampler(self.model_state)
    return result


@_wraps(WORKER, f"{_GPU}.model_states.interface:ModelState.custom_sampler")
def _custom_sampler(original: Method, self: Any, sampler: Any, *args: Any, **kwargs: Any) -> Any:
    given = original(self, sampler, *args, **kwargs)
    settings = _settings(self.vllm_config)
    if settings is None:
        return given
    if given is not None:
        raise _own_sampler(self)
    from mtp_plugin.hosts.vllm.early_kernels import of_worker
    from mtp_plugin.hosts.vllm.engine import Engine

    engine = Engine(self.vllm_config, settings, sampler, self.device, of_worker())
    setattr(self, _ENGINE, engine)
    return engine.sampler, engine.verifier


def _own_sampler(model_state: Any) -> Exception:
    from mtp_plugin.errors import HostError

    return HostError(
        f"mtp_plugin cannot sample for {type(model_state).__name__}, whose method custom_sampler "
        "returns a sampler of its own: leave out additional_config.mtp_plugin, or return "
        "super().custom_sampler(sampler)"
    )


@_wraps(WORKER, f"{_DRAFTS}.load_model")
def _load_draft_model(
    original: Method, self: Any, target_model: Any, *args: Any, **kwargs: Any
) -> Any:
    result = original(self, target_model, *args, **kwargs)
    settings = _settings(self.vllm_config)
    if settings is not None:
        from mtp_plugin.hosts.vllm.draft_layers import prepare

        prepare(self, target_model, settings)
    return result


@_wraps(WORKER, f"{_DRAFTS}.sample_draft")
def _sample_draft(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    engine = getattr(getattr(self, "model_state", None), _ENGINE, None)
    if engine is None:
        return original(self, *args, **kwargs)
    return engine.sample_draft(self, *args, **kwargs)


@_wraps(DSPARK, f"{_GPU}.spec_decode.dspark.speculator:DSparkSpeculator._sample_logits")
def _sample_logits(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    engine = getattr(getattr(self, "model_state", None), _ENGINE, None)
    if engine is None:
        return original(self, *args, **kwargs)
    return engine.sample_logits(self, *args, **kwargs)


@_wraps(WORKER, f"{_GPU}.states:RequestState.add_request")
def _add_request_state(
    original: Method,
    self: Any,
    req_id: str,
    prompt_len: int,
    all_token_ids: Any,
    *rest: Any,
    **named: Any,
) -> Any:
    result = original(self, req_id, prompt_len, all_token_ids, *rest, **named)
    # read when the sampler gets the request; relaxed acceptance derives the phase from it
    prefill = self.__dict__.setdefault("_mtp_plugin_prefill", {})
    prefill[self.req_id_to_index[req_id]] = all_token_ids
    return result


@_wraps(GRAPHS, f"{_GPU}.cudagraph_utils:CudaGraphManager._init_candidates")
def _init_candidates(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    if _is_on(self.vllm_config):
        from mtp_plugin.hosts.vllm.scheduled_draft_len import arrange_graphs, expected_schedule

        if expected_schedule(self.vllm_config) is not None:
            arrange_graphs(self)
    return result


@_wraps(GRAPHS, f"{_DRAFT_GRAPHS}.capture")
def _capture_pass(original: Method, self: Any, forward_fn: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, forward_fn, *args, **kwargs)
    if _is_on(self.vllm_config):
        from mtp_plugin.hosts.vllm.scheduled_draft_len import capture_undrafted

        graphs = capture_undrafted(
            self, forward_fn, lambda forward: original(self, forward, *args, **kwargs)
        )
        setattr(self, UNDRAFTED, graphs)
    return result


@_wraps(TAIL, f"{_OF_TARGET}.propose")
def _propose(
    original: Method,
    self: Any,
    input_batch: Any,
    attn_metadata: Any,
    slot_mappings: Any,
    last_hidden_states: Any,
    aux_hidden_states: Any,
    num_sampled: Any,
    num_rejected: Any,
    last_sampled: Any,
    next_prefill_tokens: Any,
    temperature: Any,
    seeds: Any,
    *args: Any,
    num_speculative_tokens: int | None = None,
    dummy_run: bool = False,
    **kwargs: Any,
) -> Any:
    engine = getattr(getattr(self, "model_state", None), _ENGINE, None)
    if engine is not None:
        temperature, seeds = self.temperature, self.seeds  # not read: nothing is copied into them
    given = (attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled)
    more = (num_rejected, last_sampled, next_prefill_tokens, temperature, seeds, *args)
    run = functools.partial(
        original, self, input_batch, *given, *more, dummy_run=dummy_run, **kwargs
    )

    def call(num_speculative_tokens: int | None) -> Any:
        manager: Any = getattr(self, "prefill_cudagraph_manager", None)
        undrafted = getattr(manager, UNDRAFTED, None) if num_speculative_tokens == 0 else None
        if undrafted is None:
            return run(num_speculative_tokens=num_speculative_tokens)
        graphs, manager.graphs = manager.graphs, undrafted
        try:
            return run(num_speculative_tokens=num_speculative_tokens)
        finally:
            manager.graphs = graphs

    if engine is None or engine.tail is None:
        return call(num_speculative_tokens)
    return engine.tail.propose(call, input_batch, num_sampled, num_speculative_tokens, dummy_run)


@_wraps(TAIL, f"{_OF_TARGET}.capture")
def _capture_drafts(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Capture no draft passes for the columns of a tail."""
    engine = getattr(getattr(self, "model_state", None), _ENGINE, None)
    if engine is None or engine.tail is None:
        return original(self, *args, **kwargs)
    from mtp_plugin.hosts.vllm.scheduled_draft_len import SCHEDULE

    spec, most = self.speculative_config, engine.tail.num_mtp
    schedule = getattr(spec, SCHEDULE)
    setattr(spec, SCHEDULE, [(first, last, min(k, most)) for first, last, k in schedule])
    try:
        return original(self, *args, **kwargs)
    finally:
        setattr(spec, SCHEDULE, schedule)


@_wraps(TAIL, f"{_GPU}.async_utils:AsyncOutput.get_output")
def _get_output(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    from mtp_plugin.hosts.vllm.tail_gate import MATCHES

    result = original(self, *args, **kwargs)
    kept = getattr(self.sampler_output, MATCHES, None)
    if kept is not None:  # waited for by the original
        matches, slots = kept
        setattr(result, MATCHES, matches.numpy()[slots].tolist())
    return result


@_wraps(NEW_WEIGHTS, f"{_GPU}.model_runner:GPUModelRunner.reload_weights")
def _reload_weights(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Read the draft model's weights again too: vLLM leaves them lost after sleep of level 2."""
    try:
        result = original(self, *args, **kwargs)
        given = dict(zip(("weights_iterator", "weights_path"), args, strict=False)) | kwargs
        draft = getattr(getattr(self, "speculator", None), "model", None)
        if given.get("weights_iterator") is None and draft is not None:
            from mtp_plugin.hosts.vllm.draft_head import reload_drafts

            reload_drafts(self.vllm_config, draft, given.get("weights_path"))
        return result
    finally:
        _mark_stale()


@_wraps(NEW_WEIGHTS, "vllm.v1.worker.gpu_worker:Worker.update_weights")
@_wraps(NEW_WEIGHTS, "vllm.v1.worker.gpu_worker:Worker.finish_weight_update")
def _new_weights(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Let drafts follow weights that are loaded without the model's method ``load_weights``."""
    try:
        return original(self, *args, **kwargs)
    finally:
        _mark_stale()


@_wraps(NEW_WEIGHTS, "vllm.v1.worker.gpu_worker:Worker.wake_up")
def _wake_up(original: Method, self: Any, tags: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Write what sleep of level 2 discards and no request writes again."""
    result = original(self, tags, *args, **kwargs)
    if tags is None or "weights" in tags:
        _mark_stale()
        engine = getattr(getattr(self.model_runner, "model_state", None), _ENGINE, None)
        if engine is not None:
            engine.restore()
    return result


def _mark_stale() -> None:
    loaded = sys.modules.get("mtp_plugin.hosts.vllm.draft_head")  # else no head was replaced
    if loaded is not None:
        loaded.mark_stale()


def misspelt_keys(additional_config: Any) -> list[str]:
    """Return keys that differ from the plugin's by case, ``-``, ``_`` or a plural, which vLLM keeps
    without a word."""
    given = additional_config if isinstance(additional_config, dict) else {}
    return [
        key
        for key in given
        if key != _KEY and re.sub(r"[\W_]|s$", "", str(key).lower()) == "mtpplugin"
    ]


def _is_on(vllm_config: Any) -> bool:
    extra = getattr(vllm_config, "additional_config", None)
    given = extra.get(_KEY) if isinstance(extra, dict) else None
    return given is not None and given is not False


def _kept(owner: Any, name: str, read: Callable[[Any], Any]) -> Any:
    """Return what ``read`` finds in the configuration of ``owner``, read by its first call."""
    if name not in owner.__dict__:
        owner.__dict__[name] = read(owner.vllm_config)
    return owner.__dict__[name]


def _counter_of(vllm_config: Any) -> Any:
    if not _is_on(vllm_config):
        return None
    from mtp_plugin.hosts.vllm.metrics import counter_of

    return counter_of(vllm_config)


def _lengths_of(vllm_config: Any) -> Any:
    if not _is_on(vllm_config):
        return None
    from mtp_plugin.hosts.vllm.scheduled_draft_len import lengths_of

    return lengths_of(vllm_config)


def _settings(vllm_config: Any) -> Any:
    if not _is_on(vllm_config):
        return None
    from mtp_plugin.hosts.vllm.engine_checks import checked_settings

    return checked_settings(vllm_config)


def _wrap_all(table: Mapping[str, Method]) -> dict[str, str]:
    """Wrap the methods of ``table``; returns why some could not be wrapped."""
    missing = {}
    for target, function in table.items():
        module, _, path = target.partition(":")
        owner_name, _, name = path.partition(".")
        try:
            owner = getattr(import_module(module), owner_name)
            original = owner.__dict__[name]
        except (ImportError, AttributeError, KeyError) as error:
            missing[target] = f"{target.replace(':', '.')} is missing ({error!r})"
            continue
        if not hasattr(original, _IS_WRAPPED):
            setattr(owner, name, _in_place_of(original, function))
    return missing


def _in_place_of(original: Method, function: Method) -> Method:
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(method, _IS_WRAPPED, True)
    return method
