"""The methods of vLLM that are wrapped, in an engine without and with the plugin."""

from __future__ import annotations

import logging
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import prometheus_client
import pytest
import torch
from prometheus_client import CollectorRegistry

from mtp_plugin import __version__
from mtp_plugin.errors import ConfigError, HostError
from mtp_plugin.hosts import vllm as vllm_host
from mtp_plugin.hosts.vllm import register, versions
from mtp_plugin.hosts.vllm.draft_layers import check_map, prepare
from mtp_plugin.hosts.vllm.metrics import add_alarm_metric, add_info_metric
from mtp_plugin.hosts.vllm.options import VllmOptions
from mtp_plugin.hosts.vllm.requests import PREFILL
from mtp_plugin.hosts.vllm.tail_gate import MATCHES
from mtp_plugin.hosts.vllm.versions import SIGNATURES
from mtp_plugin.hosts.vllm.wrapping import (
    _ENGINE,
    DRAFT_LENGTHS,
    DSPARK,
    FRONT_END,
    GRAPHS,
    NEW_WEIGHTS,
    START,
    TAIL,
    WORKER,
    misspelt_keys,
    wrap_worker,
)
from mtp_plugin.speculative.rows.options import EngineSettings
from tests.hosts.vllm import fake_vllm
from tests.hosts.vllm.fake_vllm import make_config

WORKER_INIT = "vllm.v1.worker.worker_base:WorkerBase.__init__"
PAGE = Path(vllm_host.__file__).parent / "DEVELOPERS.md"
DRAFT_HEAD = "mtp_plugin.hosts.vllm.draft_head"
OFF = ({}, None, "text", {"mtp_plugin": False}, {"mtp_plugin": None}, {"other": {}})

WRAPPED_IN_EVERY_PROCESS = [
    WORKER_INIT,
    "vllm.v1.engine.input_processor:InputProcessor.__init__",
    "vllm.v1.engine.input_processor:InputProcessor._validate_params",
    "vllm.sampling_params:SamplingParams._validate_spec_decode",
    "vllm.v1.engine.core:EngineCore.preprocess_add_request",
    "vllm.v1.engine.core:EngineCoreProc._handle_request_preproc_error",
    "vllm.v1.core.sched.scheduler:Scheduler.add_request",
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
]
PREPROCESS, PREPROC_ERROR, ADD_SCHEDULED, UPDATE = WRAPPED_IN_EVERY_PROCESS[4:]
LOAD_MODEL = "vllm.v1.worker.gpu.model_runner:GPUModelRunner.load_model"
WRAPPED_IN_WORKERS = [
    "vllm.v1.worker.gpu.model_states.interface:ModelState.custom_sampler",
    "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.load_model",
    "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.sample_draft",
    "vllm.v1.worker.gpu.states:RequestState.add_request",
]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    return fake_vllm.install(monkeypatch)


def function_of(modules: dict[str, ModuleType], target: str) -> Any:
    module, _, path = target.partition(":")
    owner, _, name = path.partition(".")
    return vars(getattr(modules[module], owner))[name]


def object_of(modules: dict[str, ModuleType], target: str) -> Any:
    module, _, path = target.partition(":")
    owner = getattr(modules[module], path.partition(".")[0])
    return owner.__new__(owner)


def off_config(additional: object) -> SimpleNamespace:
    """An engine that could not run with the plugin."""
    config = make_config(use_v2_model_runner=False, speculative_config=None)
    config.additional_config = additional
    return config


def test_the_wrapped_methods_are_the_documented_ones() -> None:
    assert list(START) == WRAPPED_IN_EVERY_PROCESS
    assert list(WORKER) == [LOAD_MODEL, *WRAPPED_IN_WORKERS]
    assert {*START, *WORKER} <= SIGNATURES.keys()
    parts = (TAIL, DRAFT_LENGTHS, GRAPHS, NEW_WEIGHTS, DSPARK, FRONT_END)
    compared = [target for wrapped, _ in versions.PARTS.values() for target in wrapped]
    assert sorted(compared) == sorted(target for part in parts for target in part)
    readme = PAGE.read_text(encoding="utf-8")
    for target in (target for table in (START, WORKER, *parts) for target in table):
        assert f"`{target.partition(':')[2]}`" in readme


def test_register_wraps_the_documented_methods_alone(vllm: dict[str, ModuleType]) -> None:
    every = [target for target in SIGNATURES if "." in target.partition(":")[2]]
    before = {target: function_of(vllm, target) for target in every}
    register()
    changed = [target for target in every if function_of(vllm, target) is not before[target]]
    assert sorted(changed) == sorted(WRAPPED_IN_EVERY_PROCESS)
    for target in changed:
        assert function_of(vllm, target).__wrapped__ is before[target]


def test_registering_twice_wraps_once(vllm: dict[str, ModuleType]) -> None:
    register()
    wrap_worker()
    once = {target: function_of(vllm, target) for target in (*START, *WORKER)}
    register()
    wrap_worker()
    assert {target: function_of(vllm, target) for target in once} == once


@pytest.mark.parametrize(
    ("key", "is_ours"),
    [
        *(
            (key, True)
            for key in ("mtp-plugin", "MTP_plugin", "mtp_plugins", "MtpPlugin", "mtp plugin")
        ),
        *((key, False) for key in ("mtp_plugin", "mtp", "mtp_plugin2", "plugin", 1)),
    ],
)
def test_misspelt_keys_are_those_that_differ_by_case_separators_or_a_plural(
    key: Any, is_ours: bool
) -> None:
    assert misspelt_keys({"a": 1, key: {}}) == [key] * is_ours
    assert misspelt_keys("mtp-plugin") == []


def test_front_end_logs_that_the_plugin_is_on_and_misspelt_keys(
    vllm: dict[str, ModuleType], caplog: pytest.LogCaptureFixture
) -> None:
    register()
    caplog.set_level(logging.INFO, "vllm.mtp_plugin")
    target = WRAPPED_IN_EVERY_PROCESS[1]
    on = make_config()
    on.additional_config["mtp-plugin"] = {}
    for config in (off_config({"mtp-plugin": {}}), on, make_config(speculative_config=None)):
        object_of(vllm, target).__init__(config)
    wrong = "additional_config: the key 'mtp-plugin' does not change mtp_plugin, which "
    line = "mtp_plugin on: front end, verification coupled, "
    assert caplog.messages == [
        f"{wrong}is off: the key is 'mtp_plugin'",
        f"{wrong}stays on: the key is 'mtp_plugin'",
        f"{line}3 drafts per step, drafter mtp",
        f"{line}0 drafts per step, drafter none",
    ]


@pytest.mark.usefixtures("vllm")
def test_the_metrics_of_the_front_end_say_that_the_plugin_is_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry = prometheus_client.CollectorRegistry()

    class PrometheusStatLogger:
        _gauge_cls = staticmethod(partial(prometheus_client.Gauge, registry=registry))

        def __init__(self, vllm_config: Any, engine_indexes: Any = None) -> None:
            pass

    loggers = ModuleType("vllm.v1.metrics.loggers")
    loggers.PrometheusStatLogger = PrometheusStatLogger  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, loggers.__name__, loggers)
    register()
    PrometheusStatLogger(off_config({}))
    assert not list(registry.collect())
    for _ in range(2):  # a second engine of the process
        PrometheusStatLogger(make_config({"verification": "coupled"}), [0, 1])
    labels = {
        "version": __version__,
        **{"verification": "coupled", "drafts": "3", "drafter": "mtp"},
        **{"draft_len": "fixed", "tail": "0", "draft_vocab": "all"},
    }
    assert registry.get_sample_value("mtp_plugin_info", labels) == 1
    PrometheusStatLogger(make_config({"verification": "coupled"}, speculative_config=None))
    assert registry.get_sample_value("mtp_plugin_info", labels) is None
    labels |= {"drafts": "0", "drafter": "none"}
    assert registry.get_sample_value("mtp_plugin_info", labels) == 1
    given = {"draft_len": "auto", "tail": {"ngram": 1}, "draft_vocab": 32}
    PrometheusStatLogger(make_config(given))
    labels |= {"drafts": "3", "drafter": "mtp"}
    labels |= {"draft_len": "auto", "tail": "1", "draft_vocab": "32"}
    assert registry.get_sample_value("mtp_plugin_info", labels) == 1
    add_info_metric(SimpleNamespace(), make_config())
    assert caplog.messages[-1:] == [
        "mtp_plugin_info is left out: PrometheusStatLogger of this vLLM has no _gauge_cls"
    ]


@pytest.mark.usefixtures("vllm")
def test_collapsed_acceptance_is_a_metric_of_the_front_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class PrometheusStatLogger:
        _counter_cls = staticmethod(
            partial(prometheus_client.Counter, registry=CollectorRegistry())
        )

        def __init__(self, vllm_config, engine_indexes):  # noqa: ARG002
            self.engine_indexes = engine_indexes
            self.observed = []
            self.spec_decoding_prom = SimpleNamespace(
                observe=lambda *given: self.observed.append(given)
            )

    loggers = ModuleType("vllm.v1.metrics.loggers")
    loggers.PrometheusStatLogger = PrometheusStatLogger  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, loggers.__name__, loggers)
    register()
    config = make_config(model_config__served_model_name="tiny")
    off = PrometheusStatLogger(off_config({}), [0])
    registry = PrometheusStatLogger._counter_cls.keywords["registry"]
    assert not list(registry.collect())
    # a second engine of the process counts with the same counter
    first, second = (PrometheusStatLogger(config, [0, 1]) for _ in range(2))
    names = [{"model_name": "tiny", "engine": engine} for engine in "01"]

    def values() -> list[float | None]:
        name = "mtp_plugin_acceptance_alarm_total"
        return [registry.get_sample_value(name, each) for each in names]

    assert values() == [0, 0]
    for each in (off, first, second):
        for accepted, forbidden in ((0, 0), (64, 0), (0, 32), (0, 0)):
            stats = SimpleNamespace(num_drafts=32, num_accepted_tokens=accepted)
            stats.num_draft_tokens_per_pos = [32 - forbidden] * 3
            for _ in range(16):
                each.spec_decoding_prom.observe(stats, 1)
        assert len(each.observed) == 64
    assert values() == [0, 4]


@pytest.mark.usefixtures("vllm")
def test_an_error_of_a_metric_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class PrometheusStatLogger:
        @staticmethod
        def _gauge_cls(**_: Any) -> Any:
            raise ValueError("already registered")

        def __init__(self, vllm_config: Any) -> None:
            pass

    loggers = ModuleType("vllm.v1.metrics.loggers")
    loggers.PrometheusStatLogger = PrometheusStatLogger  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, loggers.__name__, loggers)
    register()
    PrometheusStatLogger(make_config())
    assert caplog.messages[-1] == "ValueError: already registered: metric left out"


def test_stat_logger_of_another_kind_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    add_alarm_metric(SimpleNamespace(engine_indexes=[0]), make_config())
    assert caplog.messages == [
        "mtp_plugin_acceptance_alarm_total is not counted: PrometheusStatLogger of this vLLM has "
        "no _counter_cls, spec_decoding_prom"
    ]


@pytest.mark.parametrize("additional", OFF)
def test_wrappers_return_the_original_result_while_off(
    vllm: dict[str, ModuleType], additional: object
) -> None:
    register()
    wrap_worker()  # as if another engine of this process had the plugin on
    config = off_config(additional)
    for target in WRAPPED_IN_EVERY_PROCESS[:2]:
        assert function_of(vllm, target)(object_of(vllm, target), config) is None
    processor = object_of(vllm, WRAPPED_IN_EVERY_PROCESS[1])
    processor.__init__(config)
    params = SimpleNamespace(extra_args={"mtp_x": 1})
    assert processor._validate_params(params, ("generate",)) == (params, ("generate",))
    for target, names in ((PREPROCESS, "r"), (ADD_SCHEDULED, "r"), (UPDATE, "so")):
        owner = object_of(vllm, target)
        owner.vllm_config = config  # without other attributes, which are not read
        for _ in range(2):
            assert function_of(vllm, target)(owner, *names) == tuple(names)
    core = object_of(vllm, PREPROC_ERROR)
    core.vllm_config = config
    assert core._handle_request_preproc_error("request") == ("request",)
    runner = object_of(vllm, LOAD_MODEL)
    runner.vllm_config, runner.is_last_pp_rank = config, True
    assert runner.load_model(True) == (True, None, None)
    state = object_of(vllm, WRAPPED_IN_WORKERS[0])
    state.vllm_config = config
    assert state.custom_sampler("sampler") == ("sampler",)
    speculator = object_of(vllm, WRAPPED_IN_WORKERS[1])
    speculator.vllm_config = config  # without the attribute ``model``, which is not read
    assert speculator.load_model("target") == ("target",)
    speculator.model_state = state
    names = SIGNATURES[WRAPPED_IN_WORKERS[2]]
    assert speculator.sample_draft(*names) == names
    assert speculator.sample_draft(**dict(zip(names, names, strict=True))) == names


def test_a_sampler_of_the_model_itself_is_refused_while_on(vllm: dict[str, ModuleType]) -> None:
    """The base method gives None."""
    wrap_worker()
    state = object_of(vllm, WRAPPED_IN_WORKERS[0])
    state.vllm_config = off_config({})
    assert state.custom_sampler("sampler") == ("sampler",)
    state.vllm_config = make_config()
    with pytest.raises(HostError, match="returns a sampler of its own: leave out"):
        state.custom_sampler("sampler")


def test_a_model_state_that_overrides_custom_sampler_is_refused_while_on(
    vllm: dict[str, ModuleType],
) -> None:
    """Its method is not the wrapped one: the plugin would be off without notice."""
    wrap_worker()
    runner = object_of(vllm, LOAD_MODEL)
    runner.vllm_config, runner.is_last_pp_rank = make_config(), True
    sampler = object()
    runner.sampler, runner.model_state = "own", SimpleNamespace()
    for engine in (None, SimpleNamespace(sampler=sampler)):
        runner.model_state._mtp_plugin_engine = engine
        with pytest.raises(HostError, match="SimpleNamespace, whose method custom_sampler returns"):
            runner.load_model()
    runner.sampler = sampler
    runner.load_model()
    runner.is_last_pp_rank = False  # where vLLM does not call custom_sampler
    runner.model_state = None
    runner.load_model()


def test_a_worker_wraps_its_methods_only_while_on(vllm: dict[str, ModuleType]) -> None:
    register()
    before = {target: function_of(vllm, target) for target in WORKER}
    worker = object_of(vllm, WORKER_INIT)
    worker.__init__(vllm_config=off_config({}), local_rank=0)
    assert {target: function_of(vllm, target) for target in WORKER} == before
    worker.__init__(vllm_config=make_config(), local_rank=0)
    for target in WORKER:
        assert function_of(vllm, target).__wrapped__ is before[target]


def test_wrong_configurations_fail_where_front_end_and_worker_start(
    vllm: dict[str, ModuleType],
) -> None:
    register()
    config = make_config(use_v2_model_runner=False)
    for target in WRAPPED_IN_EVERY_PROCESS[:2]:
        with pytest.raises(ConfigError, match="V1 model runner"):
            object_of(vllm, target).__init__(config)


def test_requests_are_checked_while_on(vllm: dict[str, ModuleType]) -> None:
    register()
    processor = object_of(vllm, WRAPPED_IN_EVERY_PROCESS[1])
    processor.__init__(make_config())
    refused = vllm["vllm.exceptions"].VLLMValidationError
    with pytest.raises(refused, match="mtp_x: unknown option of mtp_plugin"):
        processor._validate_params(SimpleNamespace(extra_args={"mtp_x": 1}), ("generate",))
    params = SimpleNamespace(extra_args=None)
    assert processor._validate_params(params, ("generate",)) == (params, ("generate",))


def test_min_p_and_logit_bias_pass_in_engines_with_the_plugin_alone(
    vllm: dict[str, ModuleType],
) -> None:
    """vLLM refuses them with drafts; its other refusals stay."""
    owner = vllm["vllm.sampling_params"].SamplingParams
    processor = vllm["vllm.v1.engine.input_processor"].InputProcessor

    def validate_spec_decode(self: Any, speculative_config: Any) -> None:
        if speculative_config and (self.min_p or self.logit_bias or self.other):
            raise ValueError("not supported with speculative decoding")

    def validate_params(_self: Any, params: Any, _supported_tasks: Any) -> str:
        params._validate_spec_decode("drafts")
        return "valid"

    owner._validate_spec_decode = validate_spec_decode
    processor._validate_params = validate_params
    register()
    on, off = processor.__new__(processor), processor.__new__(processor)
    on.__init__(make_config())
    off.__init__(off_config({}))
    params = owner.__new__(owner)
    vars(params).update(extra_args=None, min_p=0.1, logit_bias={5: 2.0}, other=False)
    given = dict(vars(params))
    for _ in range(2):  # what one engine lifts does not stay lifted
        assert on._validate_params(params, ()) == "valid"
        for refuse in (lambda: off._validate_params(params, ()), lambda: validate(params)):
            with pytest.raises(ValueError, match="not supported with speculative"):
                refuse()
    assert vars(params) == given
    params.other = True
    for engine in (on, off):
        with pytest.raises(ValueError, match="not supported with speculative"):
            engine._validate_params(params, ())
    with pytest.raises(ValueError, match="not supported with speculative"):
        validate(params)


def validate(params: Any) -> None:
    params._validate_spec_decode("drafts")


WRONG = SimpleNamespace(
    request_id="a", client_index=2, sampling_params=SimpleNamespace(extra_args={"mtp_x": 1})
)


def test_the_engine_core_checks_requests_of_every_front_end(vllm: dict[str, ModuleType]) -> None:
    register()
    core = object_of(vllm, PREPROCESS)
    core.vllm_config = make_config()
    with pytest.raises(vllm["vllm.exceptions"].VLLMValidationError, match="mtp_x: unknown option"):
        core.preprocess_add_request(WRONG)
    for params in (None, SimpleNamespace(extra_args=None)):  # None: a pooling request
        request = SimpleNamespace(sampling_params=params)
        assert core.preprocess_add_request(request) == (request,)


def test_a_refused_request_ends_with_an_error_and_one_line(
    vllm: dict[str, ModuleType], caplog: pytest.LogCaptureFixture
) -> None:
    register()
    core = object_of(vllm, PREPROC_ERROR)
    core.vllm_config = make_config()
    sent: list[Any] = []
    core._send_error_outputs_to_client = lambda *arguments: sent.append(arguments)
    for error in (vllm["vllm.exceptions"].VLLMValidationError("wrong"), KeyError("other")):
        try:
            raise error
        except Exception:
            result = core._handle_request_preproc_error(WRONG)
    assert result == (WRONG,)  # vLLM handles other errors
    assert sent == [(["a"], 2)]
    assert [record.getMessage() for record in caplog.records] == ["request a is refused: wrong"]
    assert caplog.records[0].exc_info is None


def test_metrics_leave_out_withheld_drafts(vllm: dict[str, ModuleType]) -> None:
    counted: list[tuple[str, int]] = []

    class Scheduler(vllm["vllm.v1.core.sched.scheduler"].Scheduler):  # type: ignore[misc, name-defined]
        def make_spec_decoding_stats(self, stats: object, **named: Any) -> object:
            counted.append((named["request_id"], named["num_draft_tokens"]))
            return stats

    def update(self: Any, scheduler_output: Any, _output: Any) -> object:
        stats: object = None
        for name, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
            invalid = (scheduler_output.num_invalid_spec_tokens or {}).get(name, 0)
            count = len(drafts) - invalid
            stats = self.make_spec_decoding_stats(stats, request_id=name, num_draft_tokens=count)
        return stats

    vllm["vllm.v1.core.sched.scheduler"].Scheduler.update_from_output = update  # type: ignore[attr-defined]
    register()
    scheduler = Scheduler()
    scheduler.vllm_config = make_config()
    options = {"plain": None, "one": {"mtp_max_draft_len": 1}, "none": {"mtp_speculate": False}}
    scheduler.requests = {}
    for name, extra in options.items():
        params = SimpleNamespace(extra_args=extra)
        scheduler.requests[name] = SimpleNamespace(request_id=name, sampling_params=params)
        scheduler.add_request(scheduler.requests[name])
    for _ in range(2):
        counted.clear()
        drafts = {name: [7, 7, 7] for name in [*options, "gone"]}
        step = SimpleNamespace(scheduled_spec_decode_tokens=drafts, num_invalid_spec_tokens=None)
        scheduler.update_from_output(step, SimpleNamespace(sampled_token_ids=[[1], [1], [1], [1]]))
        assert counted == [("plain", 3), ("one", 1), ("gone", 3)]
    assert "make_spec_decoding_stats" not in vars(scheduler)


def test_ids_of_a_prefill_are_kept_for_the_sampler(vllm: dict[str, ModuleType]) -> None:
    wrap_worker()
    states = object_of(vllm, WRAPPED_IN_WORKERS[3])
    states.req_id_to_index = {"a": 2, "b": 5}
    result = states.add_request("a", 2, [1, 2, 3], 3, 10)
    assert result == ("a", 2, [1, 2, 3], 3, 10)
    states.add_request("b", prompt_len=1, all_token_ids=[4], num_computed_tokens=0, max_tokens=1)
    assert vars(states)[PREFILL] == {2: [1, 2, 3], 5: [4]}


@pytest.mark.parametrize(
    ("options", "rank", "starts"),
    [({}, 0, [(90, True)]), ({}, 1, [(90, False)]), ({"kernels": "reference"}, 0, [])],
)
def test_a_worker_on_a_cuda_device_compiles_kernels_early(
    vllm: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    rank: int,
    starts: list[tuple[int, bool]],
) -> None:
    found: list[tuple[int, bool]] = []

    def start(_config: object, _settings: object, capability: int, *, is_first_rank: bool) -> None:
        found.append((capability, is_first_rank))

    monkeypatch.setattr("mtp_plugin.hosts.vllm.early_kernels.start", start)
    vllm["vllm.platforms"].current_platform = SimpleNamespace(  # type: ignore[attr-defined]
        is_cuda=lambda: True, get_device_capability=lambda: SimpleNamespace(to_int=lambda: 90)
    )
    register()
    object_of(vllm, WORKER_INIT).__init__(vllm_config=make_config(options), local_rank=rank)
    assert found == starts


@pytest.mark.parametrize(
    "missing", [*WRAPPED_IN_EVERY_PROCESS[2:], LOAD_MODEL, *WRAPPED_IN_WORKERS]
)
def test_missing_methods_are_noticed_only_while_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    signatures = {name: s for name, s in SIGNATURES.items() if name != missing}
    modules = fake_vllm.install(monkeypatch, signatures=signatures)
    with caplog.at_level(logging.DEBUG):
        register()
    assert not caplog.records
    worker = object_of(modules, WORKER_INIT)
    worker.__init__(off_config({}))
    with pytest.raises(HostError) as error:
        worker.__init__(make_config())
    assert str(error.value) == (
        f"mtp_plugin does not fit vLLM 0.32: {missing.replace(':', '.')} is missing. Install "
        "vLLM 0.33, or leave out additional_config.mtp_plugin"
    )


@pytest.mark.parametrize("has_dspark", [False, True])
def test_dspark_is_wrapped_for_its_drafts_alone(
    monkeypatch: pytest.MonkeyPatch, has_dspark: bool
) -> None:
    """A vLLM without the class serves the other drafters."""
    (target,) = DSPARK
    signatures, attributes = versions.PARTS["dspark"]
    modules = fake_vllm.install(
        monkeypatch, signatures={**SIGNATURES, **(signatures if has_dspark else {})}
    )
    register()
    object_of(modules, WORKER_INIT).__init__(make_config())
    draft_model = SimpleNamespace(get_vocab_size=lambda: 900, architectures=[])
    config = make_config(
        speculative_config__method="dspark", speculative_config__draft_model_config=draft_model
    )
    worker = object_of(modules, WORKER_INIT)
    if not has_dspark:
        with pytest.raises(HostError, match=r"DSparkSpeculator\._sample_logits is missing"):
            worker.__init__(config)
        return
    assert not hasattr(function_of(modules, target), "__wrapped__")
    speculator: Any = object_of(modules, target)
    for name in attributes[target.rpartition(".")[0]]:
        setattr(type(speculator), name, None)
    worker.__init__(config)
    assert speculator._sample_logits(*signatures[target]) == signatures[target]
    engine = SimpleNamespace(sample_logits=lambda *given, step: (given, step))
    speculator.model_state = SimpleNamespace(**{_ENGINE: engine})
    assert speculator._sample_logits(1, step=2) == ((speculator, 1), 2)
    model = SimpleNamespace(sample_sequential="kernels of the model's own, which 0.33 prefers")
    settings = EngineSettings(VllmOptions(), 3, drafter="dspark")
    prepare(SimpleNamespace(model=model), None, settings)
    assert model.sample_sequential is None


def test_norms_stay_as_they_are_in_a_vllm_without_such_ops(
    vllm: dict[str, ModuleType], caplog: pytest.LogCaptureFixture
) -> None:
    """The fake has no ``vllm.ir``."""
    wrap_worker()
    speculator = object_of(vllm, WRAPPED_IN_WORKERS[1])
    speculator.vllm_config = make_config()
    assert speculator.load_model("target") == ("target",)
    assert "norms stay unfused in this vLLM" in caplog.text


def test_a_missing_map_of_draft_ids_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    for offsets in (None, torch.tensor([0, 0, 5])):
        check_map(SimpleNamespace(draft_id_to_target_id=offsets))
    check_map(SimpleNamespace())
    assert not caplog.records
    check_map(SimpleNamespace(draft_id_to_target_id=torch.zeros(3, dtype=torch.int64)))
    (record,) = caplog.records
    assert "3 ids are fewer than the model's and their map (d2t) is" in record.getMessage()


def test_a_tail_of_copied_text_reaches_proposals_graphs_and_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    propose, capture, get_output = versions.TAIL
    assert list(TAIL) == [propose, capture, get_output]
    assert "TargetDependentARSpeculator.propose is missing" in versions.part_problems("tail")[0]
    more = {propose: (*versions.TAIL[propose], "dummy_run", "num_speculative_tokens")}
    modules = fake_vllm.install(monkeypatch, signatures={**SIGNATURES, **versions.TAIL, **more})
    output = object_of(modules, get_output)
    type(output).get_output = lambda _: SimpleNamespace()
    wrap_worker()
    speculator = object_of(modules, propose)
    given = [*range(11)]
    assert speculator.propose(*given, num_speculative_tokens=3) == (*given, False, 3)
    assert speculator.capture() == ()

    tail = SimpleNamespace(num_mtp=3, propose=lambda *given: given)
    engine = SimpleNamespace(tail=tail)
    speculator.model_state = SimpleNamespace(**{_ENGINE: engine})
    speculator.temperature, speculator.seeds = "own temperature", "own seeds"
    own = (*given[:9], "own temperature", "own seeds")  # so that vLLM copies nothing
    call, *got = speculator.propose(*given, num_speculative_tokens=7)
    assert got == [0, 5, 7, False]
    assert call(3) == (*own, False, 3)
    engine.tail = None
    assert speculator.propose(*given, num_speculative_tokens=3) == (*own, False, 3)
    engine.tail = tail

    during: list[Any] = []

    class Config(SimpleNamespace):
        def __setattr__(self, name: str, value: Any) -> None:
            during.append(value)

    schedule = [(1, 7, 3), (8, 8, 7)]
    speculator.speculative_config = Config(num_speculative_tokens_per_batch_size=schedule)
    speculator.capture()
    assert during == [[(1, 7, 3), (8, 8, 3)], schedule]

    kept_matches = {MATCHES: (torch.tensor([False, True, False]), torch.tensor([1, 0]).numpy())}
    for kept, expected in (({}, {}), (kept_matches, {MATCHES: [True, False]})):
        output.sampler_output = SimpleNamespace(**kept)
        assert vars(output.get_output()) == expected


def test_a_step_without_drafts_replays_the_first_pass_without_the_draft_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Modelled on 0.33, whose graphs ignore ``skip_sample``; 0.32's pass has no such argument."""
    (_, capture), (propose, *_) = GRAPHS, TAIL
    signatures = {**SIGNATURES, **versions.PARTS["draft_len"][0], **versions.TAIL}
    modules = fake_vllm.install(monkeypatch, signatures=signatures)
    manager, speculator = object_of(modules, capture), object_of(modules, propose)
    mixed, one, four = (SimpleNamespace(uniform_token_count=n, cg_mode=n) for n in (None, 1, 4))

    def record(self: Any, forward_fn: Any, state: Any) -> None:
        found = [desc for descs in self._capture_descs.values() for desc in descs]
        self.graphs |= {id(desc): (state, forward_fn) for desc in found}

    def replay(self: Any, desc: Any, *_given: Any, **_named: Any) -> Any:
        state, forward = self.prefill_cudagraph_manager.graphs[id(desc)]
        return state, forward()

    type(manager).capture, type(speculator).propose = record, replay
    wrap_worker()
    on, off = make_config(), off_config({})
    for config, forward, expected in (
        (on, lambda skip_sample=False: skip_sample, [(one, 0)]),
        (on, lambda: False, []),
        (off, lambda skip_sample=False: skip_sample, []),
    ):
        manager = object_of(modules, capture)
        manager.vllm_config, manager.graphs = config, (graphs := {})
        manager._capture_descs = {"mixed": [mixed], "full": [one, four]}
        manager.capture(forward, "state")
        speculator.prefill_cudagraph_manager = manager
        cases = [(desc, drafts) for desc in (mixed, one, four) for drafts in (None, 0, 3)]
        skipped = {
            (id(desc), drafts): speculator.propose(
                desc, *[None] * 10, num_speculative_tokens=drafts
            )
            for desc, drafts in cases
        }
        assert skipped == {(id(d), k): ("state", (d, k) in expected) for d, k in cases}
        assert manager.graphs is graphs
        assert manager._capture_descs == {"mixed": [mixed], "full": [one, four]}


@pytest.mark.parametrize("target", NEW_WEIGHTS)
def test_methods_that_give_new_weights_let_drafts_follow(
    monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """Some versions lack them; what raised may have loaded some weights."""
    modules = fake_vllm.install(monkeypatch, signatures={**SIGNATURES, target: ("tags",)})
    marked: list[str] = []
    monkeypatch.setattr(f"{DRAFT_HEAD}.mark_stale", lambda: marked.append("stale"))
    wrap_worker()
    owner = object_of(modules, target)
    engine = SimpleNamespace(restore=lambda: marked.append("restored"))
    state = SimpleNamespace(**{_ENGINE: engine})
    owner.model_runner = SimpleNamespace(model_state=state)
    call = getattr(owner, target.rpartition(".")[2])
    wakes = target.endswith("wake_up")
    assert call(["weights"]) == (["weights"],)
    assert marked == (["stale", "restored"] if wakes else ["stale"])
    if wakes:
        assert call(["kv_cache"]) == (["kv_cache"],)
        assert len(marked) == 2


@pytest.mark.parametrize(("rank", "count"), [(0, 1), (1, 0)])
def test_an_untested_version_that_fits_starts_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int, count: int
) -> None:
    modules = fake_vllm.install(monkeypatch, "0.99.0")
    register()
    object_of(modules, WORKER_INIT).__init__(vllm_config=make_config(), local_rank=0, rank=rank)
    assert caplog.text.count("vLLM 0.99 was not tested") == count


def test_a_vllm_whose_workers_cannot_be_wrapped_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_vllm.install(monkeypatch, "0.8.5", {"vllm.engine:run": ("x",)})
    register()
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "mtp_plugin cannot be used with this vLLM: vllm.v1.worker.worker_base.WorkerBase.__init__ "
        "is missing (ModuleNotFoundError"
    )


def modules_after(code: str) -> set[str]:
    """Modules that a new process has loaded after ``code``."""
    code += "\nimport sys; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


FAKE = f"""
import sys
from types import ModuleType, SimpleNamespace
sys.path += {sys.path!r}
def add(name, **attributes):
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(attributes)
class Base:
    def __init__(self, vllm_config): self.vllm_config = vllm_config
class Processor(Base):
    def _validate_params(self, params): return params
class Core(Base):
    def preprocess_add_request(self, request): return request
    def _handle_request_preproc_error(self, request): return request
class Scheduler(Base):
    def add_request(self, request): return request
    def update_from_output(self, scheduled, output): return output
for name in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.engine", "vllm.v1.core",
             "vllm.v1.core.sched"):
    add(name)
add("vllm.v1.worker.worker_base", WorkerBase=Base)
add("vllm.v1.engine.input_processor", InputProcessor=Processor)
add("vllm.v1.core.sched.scheduler", Scheduler=Scheduler)
add("vllm.v1.engine.core", EngineCore=Core, EngineCoreProc=Core)
from mtp_plugin.hosts.vllm import register
register()
config = SimpleNamespace(additional_config={{}})
Base(config)
Processor(config)._validate_params(1)
Core(config).preprocess_add_request(1)
Core(config)._handle_request_preproc_error(1)
Scheduler(config).add_request(1)
Scheduler(config).update_from_output(1, 2)
"""


def test_only_the_standard_library_is_loaded_while_off() -> None:
    loaded = modules_after(FAKE)
    ours = {name for name in loaded if name.split(".")[0] == "mtp_plugin"}
    assert ours <= {
        "mtp_plugin",
        "mtp_plugin.version",
        "mtp_plugin.hosts",
        "mtp_plugin.hosts.vllm",
        "mtp_plugin.hosts.vllm.wrapping",
    }
    roots = {name.split(".")[0] for name in loaded - ours} - {"vllm", "__main__", "__mp_main__"}
    assert roots <= sys.stdlib_module_names


def test_an_engine_with_the_plugin_loads_no_reading_of_other_hosts() -> None:
    parts = ("early_kernels", "engine_checks", "draft_layers", "metrics", "copied_tail")
    names = ", ".join(f"mtp_plugin.hosts.vllm.{part}" for part in parts)
    loaded = modules_after(f"import sys; sys.path += {sys.path!r}; import {names}")
    host = "mtp_plugin.speculative.host"
    found = {name.removeprefix(f"{host}.") for name in loaded if name.startswith(f"{host}.")}
    assert found == {"config", "request", "signatures"}
    assert "mtp_plugin.speculative.drafting" not in loaded
