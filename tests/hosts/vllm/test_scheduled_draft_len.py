"""The number of drafts of a step, as the plugin sets it in vLLM's scheduler."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge

from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.vllm import register
from mtp_plugin.hosts.vllm.engine_checks import checked_settings
from mtp_plugin.hosts.vllm.metrics import LENGTH_METRIC, add_length_metric
from mtp_plugin.hosts.vllm.scheduled_draft_len import (
    AFTER_SCHEDULE,
    SCHEDULE,
    SCHEDULED,
    schedule_of,
    set_schedule,
)
from mtp_plugin.hosts.vllm.versions import SIGNATURES
from tests.hosts.vllm import fake_vllm
from tests.hosts.vllm.fake_vllm import make_config

AUTO = {"draft_len": "auto"}
CONFIG_INIT = "vllm.config.vllm:VllmConfig.__post_init__"
UPDATE = "vllm.v1.core.sched.scheduler:Scheduler.update_from_output"


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    more = {AFTER_SCHEDULE: ("scheduler_output",), CONFIG_INIT: ()}
    modules = fake_vllm.install(monkeypatch, signatures={**SIGNATURES, **more})
    outputs = ModuleType("vllm.v1.core.sched.output")
    outputs.SchedulerOutput = type("SchedulerOutput", (), {SCHEDULED[1][0]: 0})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, outputs.__name__, outputs)
    return modules


def prepared(given: Any = AUTO, **changes: Any) -> SimpleNamespace:
    """A configuration after ``VllmConfig.__post_init__``."""
    config = make_config(given, **changes)
    set_schedule(config)
    return config


@pytest.mark.parametrize(
    ("lengths", "most", "expected"),
    [
        ((0, 1, 2, 3), 8, [(1, 5, 0), (6, 6, 1), (7, 7, 2), (8, 8, 3)]),
        ((3, 7), 2, [(1, 1, 3), (2, 2, 7)]),
        ((2,), 1, [(1, 1, 2)]),
    ],
)
def test_every_length_has_graphs_for_almost_all_batch_sizes(
    lengths: tuple[int, ...], most: int, expected: list[tuple[int, int, int]]
) -> None:
    assert schedule_of(lengths, most) == expected


def test_the_schedule_is_set_while_on(vllm: dict[str, ModuleType]) -> None:
    register()
    config_class = vllm["vllm.config.vllm"].VllmConfig
    for given, expected in ((AUTO, schedule_of(range(4), 8)), ({}, None), ({"x": 1}, None)):
        config = config_class.__new__(config_class)
        vars(config).update(vars(make_config(given)))
        for _ in range(2):  # vLLM copies configurations
            assert config.__post_init__() == ()
            assert config.speculative_config.num_speculative_tokens_per_batch_size == expected
    for config in (
        prepared(speculative_config=None),
        prepared(AUTO, **{f"speculative_config__{SCHEDULE}": [[1, 8, 2]]}),
    ):
        assert getattr(config.speculative_config, SCHEDULE, [[1, 8, 2]]) == [[1, 8, 2]]


@pytest.mark.usefixtures("vllm")
def test_an_engine_with_the_schedule_starts() -> None:
    settings = checked_settings(prepared())
    assert settings is not None
    assert settings.options.draft_len == "auto"
    copied = prepared()
    copied.speculative_config.num_speculative_tokens_per_batch_size = [
        list(each) for each in schedule_of(range(4), 8)
    ]
    assert checked_settings(copied) is not None


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"parallel_config__data_parallel_size": 2},
            "draft_len 'auto' is not supported with data_parallel_size 2, whose ranks must make "
            "the same number of drafts: set it to 1, or leave out draft_len",
        ),
        *(
            (
                {f"speculative_config__{SCHEDULE}": given},
                "draft_len 'auto' is not possible with a speculative_config."
                "num_speculative_tokens_per_batch_size of your own: leave out one of them",
            )
            # no length of ours, and our lengths for other batch sizes
            for given in ([[1, 8, 2]], [[1, 2, 0], [3, 4, 1], [5, 6, 2], [7, 8, 3]])
        ),
        (
            {"scheduler_config__max_num_seqs": 3},
            "draft_len 'auto' with num_speculative_tokens 3 needs max_num_seqs of 4 or more, got 3",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        checked_settings(prepared(**changes))
    assert f"mtp_plugin is on, but {problem}. Change this" in str(error.value)


def test_a_vllm_that_cannot_change_the_number_is_refused(vllm: dict[str, ModuleType]) -> None:
    with pytest.raises(ConfigError, match="of the plugin, which was loaded too late: leave"):
        checked_settings(make_config(AUTO))
    del vllm["vllm.v1.core.sched.scheduler"].Scheduler._update_after_schedule
    with pytest.raises(ConfigError, match="_update_after_schedule is missing: leave it out"):
        checked_settings(prepared())


def test_the_scheduler_sets_the_number_of_drafts(vllm: dict[str, ModuleType]) -> None:
    """The length of a step is set before vLLM plans the next one."""
    register()
    scheduler_class = vllm["vllm.v1.core.sched.scheduler"].Scheduler
    scheduler = scheduler_class.__new__(scheduler_class)
    scheduler.vllm_config, scheduler.requests = prepared(), {}
    seen = []
    for _ in range(40):
        step = fake_vllm_output(drafted=seen[-1] if seen else 0)
        assert scheduler._update_after_schedule(step) == (step,)
        seen.append(step.num_spec_tokens_to_schedule)
        output = SimpleNamespace(sampled_token_ids=[[1], [1]], req_id_to_index={"a": 0, "b": 1})
        assert scheduler.update_from_output(step, output) == (step, output)
    assert {3, 0} <= set(seen)
    scheduler = scheduler_class.__new__(scheduler_class)
    scheduler.vllm_config = prepared({})
    step = fake_vllm_output()
    scheduler._update_after_schedule(step)
    assert step.num_spec_tokens_to_schedule == 3


@pytest.mark.usefixtures("vllm")
def test_the_metrics_of_the_front_end_show_the_number_in_use() -> None:
    registry = CollectorRegistry()
    recorded = []
    logger = SimpleNamespace(
        _gauge_cls=lambda multiprocess_mode, **given: Gauge(**given, registry=registry),  # noqa: ARG005
        record=lambda *given, engine_idx: recorded.append((*given, engine_idx)),
    )
    config = prepared(model_config__served_model_name="tiny")
    add_length_metric(logger, config)

    def value() -> float | None:
        return registry.get_sample_value(LENGTH_METRIC, {"model_name": "tiny", "engine": "1"})

    generating = SimpleNamespace(num_generation_tokens=2, num_prompt_tokens=0)
    prompts = SimpleNamespace(num_generation_tokens=2, num_prompt_tokens=9)
    for per_position, iteration, expected in (
        ([8, 8, 0], generating, 2),
        (None, prompts, 2),
        (None, None, 2),
        (None, generating, 0),
        ([1, 0, 0], prompts, 1),
    ):
        drafts = per_position and SimpleNamespace(num_draft_tokens_per_pos=per_position)
        stats = SimpleNamespace(spec_decoding_stats=drafts)
        logger.record(stats, iteration, engine_idx=1)
        assert recorded[-1] == (stats, iteration, 1)
        assert value() == expected
    record = logger.record
    add_length_metric(logger, make_config({}))
    assert logger.record is record


class Output(SimpleNamespace):
    """vLLM's ``SchedulerOutput``."""

    __hash__ = object.__hash__


def fake_vllm_output(drafted: int = 0) -> Output:
    return Output(
        num_scheduled_tokens={"a": 1 + drafted, "b": 1 + drafted},
        total_num_scheduled_tokens=2 + 2 * drafted,
        scheduled_spec_decode_tokens={n: [-1] * drafted for n in "ab"} if drafted else {},
        num_invalid_spec_tokens=None,
        num_spec_tokens_to_schedule=3,
    )


# ---- a tail of copied text, which has two numbers of drafts

SEVEN = {"speculative_config__num_speculative_tokens": 7}


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("given", "schedule"),
    [
        ({"tail": {"ngram": 4}}, [(1, 7, 3), (8, 8, 7)]),
        ({"tail": {"ngram": 5}, **AUTO}, [(1, 5, 0), (6, 6, 1), (7, 7, 2), (8, 8, 7)]),
    ],
)
def test_a_tail_has_graphs_for_every_number_of_drafts(given: Any, schedule: Any) -> None:
    config = prepared(given, **SEVEN)
    assert config.speculative_config.num_speculative_tokens_per_batch_size == schedule
    assert checked_settings(config) is not None


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("length", "changes", "problem"),
    [
        (
            7,
            {},
            "tail.ngram: expected fewer than num_speculative_tokens = 7, got 7: the MTP layers "
            "make the drafts before the tail",
        ),
        (
            4,
            {"speculative_config__method": "ngram"},
            "tail follows drafts of MTP layers alone, and method is 'ngram': leave it out",
        ),
        (
            4,
            {"speculative_config": None},
            "tail follows drafts of MTP layers alone, and there is no speculative_config: leave it "
            "out",
        ),
        (
            4,
            {"speculative_config__use_multi_module_mtp": lambda: True},
            "tail is not supported with several MTP modules, which vLLM always runs all: leave it "
            "out",
        ),
        (
            4,
            {"parallel_config__data_parallel_size": 2},
            "tail is not supported with data_parallel_size 2, whose ranks must make the same "
            "number of drafts: set it to 1, or leave out tail",
        ),
        (
            4,
            {f"speculative_config__{SCHEDULE}": [[1, 8, 3]]},
            "tail is not possible with a speculative_config.num_speculative_tokens_per_batch_size "
            "of your own: leave out one of them",
        ),
        (
            4,
            {"scheduler_config__max_num_seqs": 1},
            "tail with num_speculative_tokens 7 needs max_num_seqs of 2 or more, got 1",
        ),
    ],
)
def test_a_tail_that_cannot_be_served_is_refused(
    length: int, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError) as error:
        checked_settings(prepared({"tail": {"ngram": length}}, **SEVEN, **changes))
    assert f"is on, but {problem}. Change this" in str(error.value)
