"""Options of requests, and the counts of drafts."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.hosts.vllm.metrics import DraftCounter, counter_of
from mtp_plugin.hosts.vllm.options import VllmOptions
from mtp_plugin.hosts.vllm.requests import (
    MAX_BIASED_TOKENS,
    AdmittedOptions,
    check_request,
    request_facts,
)
from mtp_plugin.ops.sampling import DraftedBy, VerifiedBy
from mtp_plugin.requests.options import OPTIONS
from mtp_plugin.requests.stopping import MAX_STOP_IDS
from mtp_plugin.speculative.metrics.alarms import COLLAPSE_STEPS
from mtp_plugin.speculative.rows.options import EngineSettings
from mtp_plugin.speculative.rows.request_options import RequestOptions, read_request
from mtp_plugin.speculative.rows.request_slots import RequestSlots
from tests.hosts.vllm import fake_vllm
from tests.hosts.vllm.fake_vllm import make_config

THINKING = VllmOptions(thinking_begin_token=5, thinking_end_token=7)
COUPLED = EngineSettings(VllmOptions(), 3)
SETTINGS = EngineSettings(THINKING, 3, keeps_draft_probs=True)
SYNTHETIC = EngineSettings(VllmOptions(), 3, True, (0.5, 0.5, 0.5))

KNOWN = (
    "unknown option of mtp_plugin; known ones are mtp_verification, mtp_relaxed_topk, "
    "mtp_relaxed_delta, mtp_speculate, mtp_max_draft_len"
)
NO_THINKING = (
    "relaxed acceptance needs additional_config.mtp_plugin.thinking_begin_token and "
    "thinking_end_token"
)
NO_PROBS = (
    "needs speculative_config.draft_sample_method 'probabilistic', with which the engine keeps the "
    "probabilities of drafts"
)


def refusal(name: str) -> str:
    """The message that the table of request options has for a key."""
    return f"mtp_{name}: expected {OPTIONS[name].values.words}, got"


METHOD = refusal("verification")
DELTA = refusal("relaxed_delta")
TOPK = refusal("relaxed_topk")
LIMIT = refusal("max_draft_len")
SPECULATE = refusal("speculate")
WRONG: list[tuple[EngineSettings, Any, str]] = [
    *((SETTINGS, given, f"expected a mapping, got {given!r}") for given in (5, "mtp_x", "")),
    (SETTINGS, [], "expected a mapping, got []"),
    (SETTINGS, {"mtp_x": 1}, f"mtp_x: {KNOWN}"),
    (SETTINGS, {"mtp_": 1}, f"mtp_: {KNOWN}"),
    (SETTINGS, {"mtp_Speculate": True}, f"mtp_Speculate: {KNOWN}"),
    (SETTINGS, {"mtp-speculate": False, "MTP_x": 1}, f"mtp-speculate: {KNOWN}; MTP_x: {KNOWN}"),
    (SETTINGS, {"mtp_verification": 1}, f"{METHOD} 1"),
    (SETTINGS, {"mtp_verification": "synthetic"}, f"{METHOD} 'synthetic'"),
    (COUPLED, {"mtp_verification": "rejection"}, f"mtp_verification: rejection {NO_PROBS}"),
    (COUPLED, {"mtp_verification": "block"}, f"mtp_verification: block {NO_PROBS}"),
    (
        SYNTHETIC,
        {"mtp_verification": "block"},
        "mtp_verification: block cannot be combined with rejection_sample_method 'synthetic'",
    ),
    (SETTINGS, {"mtp_relaxed_topk": 0}, f"{TOPK} 0"),
    (SETTINGS, {"mtp_relaxed_topk": 2**31}, f"{TOPK} 2147483648"),
    (COUPLED, {"mtp_relaxed_topk": 3}, f"mtp_relaxed_topk: {NO_THINKING}"),
    (SETTINGS, {"mtp_relaxed_delta": -0.1}, f"{DELTA} -0.1"),
    # neither fits a float nor can be written as a decimal number
    (SETTINGS, {"mtp_relaxed_delta": 10**5000}, f"{DELTA} an integer of 16610 bits"),
    (COUPLED, {"mtp_relaxed_delta": 0.5}, f"mtp_relaxed_delta: {NO_THINKING}"),
    (SETTINGS, {"mtp_speculate": 2}, f"{SPECULATE} 2"),
    (SETTINGS, {"mtp_speculate": 1.0}, f"{SPECULATE} 1.0"),
    (SETTINGS, {"mtp_max_draft_len": -1}, f"{LIMIT} -1"),
    (
        SETTINGS,
        {"mtp_max_draft_len": 4},
        "mtp_max_draft_len: expected at most num_speculative_tokens = 3, got 4",
    ),
    (SETTINGS, {"mtp_speculate": 2, "mtp_a": 1}, f"{SPECULATE} 2; mtp_a: {KNOWN}"),
    (
        COUPLED,
        {"mtp_verification": "block", "mtp_relaxed_topk": 2, "mtp_max_draft_len": 9},
        f"mtp_verification: block {NO_PROBS}; mtp_relaxed_topk: {NO_THINKING}; "
        "mtp_max_draft_len: expected at most num_speculative_tokens = 3, got 9",
    ),
]


@pytest.mark.parametrize(("settings", "extra", "message"), WRONG)
def test_wrong_options_are_refused_at_admission(
    monkeypatch: pytest.MonkeyPatch, settings: EngineSettings, extra: Any, message: str
) -> None:
    exceptions = fake_vllm.install(monkeypatch)["vllm.exceptions"]
    with pytest.raises(exceptions.VLLMValidationError) as error:
        check_request(SimpleNamespace(extra_args=extra), settings)
    assert str(error.value) == f"extra_args: {message}"


@pytest.mark.parametrize(
    ("extra", "options"),
    [
        ({"mtp_verification": "block"}, {"verification": "block"}),
        (
            {"mtp_relaxed_topk": 3, "mtp_relaxed_delta": 1},
            {"relaxed_topk": 3, "relaxed_delta": 1.0},
        ),
        ({"mtp_relaxed_delta": 0.25}, {"relaxed_delta": 0.25}),
        ({"mtp_relaxed_delta": 2}, {"relaxed_delta": 2.0}),
        ({"mtp_relaxed_topk": None, "mtp_verification": None}, {}),
        ({"mtp_speculate": 0}, {"speculate": False}),
        ({"mtp_speculate": 1}, {"speculate": True}),
        ({"mtp_speculate": False}, {"speculate": False}),
        ({"mtp_max_draft_len": 0}, {"max_draft_len": 0}),
        ({"mtp_max_draft_len": 3, "other": object()}, {"max_draft_len": 3}),
    ],
)
def test_options_of_a_request_are_read(extra: dict[str, Any], options: dict[str, Any]) -> None:
    assert read_request(extra, SETTINGS) == RequestOptions(**options)
    check_request(SimpleNamespace(extra_args=extra), SETTINGS)


@pytest.mark.parametrize("extra", [None, {}, {"kv_transfer_params": {}}, {"my_mtp_": 1}, {3: 1}])
def test_options_of_others_are_left_alone(extra: dict[Any, Any] | None) -> None:
    check_request(SimpleNamespace(extra_args=extra), SETTINGS)
    assert read_request(extra, SETTINGS) == RequestOptions()


def test_pooling_params_have_no_extra_args() -> None:
    check_request(SimpleNamespace(), SETTINGS)


def test_methods_by_probability_are_accepted_without_drafts() -> None:
    """The same request can be sent to an engine without speculative decoding."""
    without = EngineSettings(VllmOptions(), 0)
    assert read_request({"mtp_verification": "block"}, without).verification == "block"


@pytest.mark.parametrize(
    "name", ["structured_outputs", "bad_words", "allowed_token_ids", "min_p", "logit_bias"]
)
def test_synthetic_acceptance_refuses_options_that_change_probabilities(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    exceptions = fake_vllm.install(monkeypatch)["vllm.exceptions"]
    params = SimpleNamespace(extra_args=None, **{name: {1: 1.0}})
    check_request(params, SETTINGS)
    with pytest.raises(exceptions.VLLMValidationError) as error:
        check_request(params, SYNTHETIC)
    assert str(error.value).startswith(
        f"{name}: not possible with rejection_sample_method 'synthetic'"
    )


def test_more_biased_tokens_than_a_worker_holds_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exceptions = fake_vllm.install(monkeypatch)["vllm.exceptions"]
    bias = dict.fromkeys(range(MAX_BIASED_TOKENS), 1.0)
    check_request(SimpleNamespace(extra_args=None, logit_bias=bias), SETTINGS)
    bias[MAX_BIASED_TOKENS] = 1.0
    with pytest.raises(exceptions.VLLMValidationError) as error:
        check_request(SimpleNamespace(extra_args=None, logit_bias=bias), SETTINGS)
    assert str(error.value) == "logit_bias: expected at most 1024 tokens, got 1025"


# ---- columns of the slot table


def params_of(**options: Any) -> SimpleNamespace:
    defaults = {"temperature": 0.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    stops = {
        "all_stop_token_ids": set(),
        "stop_token_ids": [],
        "ignore_eos": False,
        "min_tokens": 0,
    }
    return SimpleNamespace(**{**defaults, **stops, **options})


def values_of(
    settings: EngineSettings = SETTINGS,
    prefill: tuple[int, ...] = (1, 2),
    num_output: int = 0,
    params: SimpleNamespace | None = None,
    **extra: Any,
) -> dict[str, Any]:
    options = read_request({f"mtp_{name}": value for name, value in extra.items()}, settings)
    slots = RequestSlots(1, torch.device("cpu"), settings)
    prompt_len = len(prefill) - num_output
    facts = request_facts(params or params_of(), options, prompt_len)
    return slots.values(facts, options, prefill)


@pytest.mark.parametrize(
    ("engine", "request_method", "verified_by", "drafted_by"),
    [
        ("coupled", None, VerifiedBy.COUPLED, DraftedBy.COUPLED),
        ("coupled", "rejection", VerifiedBy.REJECTION, DraftedBy.PLAIN),
        ("rejection", None, VerifiedBy.REJECTION, DraftedBy.PLAIN),
        ("rejection", "block", VerifiedBy.BLOCK, DraftedBy.PLAIN),
        ("block", "coupled", VerifiedBy.COUPLED, DraftedBy.COUPLED),
    ],
)
def test_the_method_of_a_request_replaces_that_of_the_engine(
    engine: str, request_method: str | None, verified_by: VerifiedBy, drafted_by: DraftedBy
) -> None:
    settings = EngineSettings(VllmOptions(verification=engine), 3, keeps_draft_probs=True)
    extra = {} if request_method is None else {"verification": request_method}
    values = values_of(settings, **extra)
    assert (values["verification"], values["draft_sampling"]) == (verified_by, drafted_by)


@pytest.mark.parametrize(
    ("extra", "limit"),
    [
        ({}, None),
        ({"speculate": True}, None),
        ({"speculate": False}, 0),
        ({"speculate": False, "max_draft_len": 2}, 0),
        ({"max_draft_len": 0}, 0),
        ({"max_draft_len": 2}, 2),
        ({"max_draft_len": 3}, None),  # K
    ],
)
def test_draft_limit_of_a_request(extra: dict[str, Any], limit: int | None) -> None:
    assert values_of(**extra).get("draft_limit") == limit


def test_a_preempted_request_continues_the_step_count_at_its_output_tokens() -> None:
    assert values_of()["draft_step"] == 0
    assert values_of(prefill=(1, 2, 3, 4, 5), num_output=3)["draft_step"] == 3


@pytest.mark.parametrize(
    ("prefill", "thinking"),
    [
        ((), 0),
        ((1, 2), 0),
        ((5,), 1),
        ((5, 1, 2), 1),
        ((5, 1, 7), 0),
        ((7, 5, 1), 1),
        ((5, 7, 5), 1),
    ],
)
def test_the_phase_of_a_request_is_that_of_its_prefill(
    prefill: tuple[int, ...], thinking: int
) -> None:
    assert values_of(prefill=prefill)["thinking"] == thinking


def test_relaxed_limits_of_a_request_replace_those_of_the_engine() -> None:
    options = VllmOptions(
        thinking_begin_token=5, thinking_end_token=7, relaxed_topk=4, relaxed_delta=0.3
    )
    settings = EngineSettings(options, 3)
    values = values_of(settings)
    assert (values["relaxed_topk"], values["relaxed_limit"]) == (4, 0.3)
    values = values_of(settings, relaxed_topk=1, relaxed_delta=0)
    assert (values["relaxed_topk"], values["relaxed_limit"]) == (1, 0.0)


def test_a_request_with_too_many_stop_ids_is_verified_strictly() -> None:
    for count, topk in ((MAX_STOP_IDS, 4), (MAX_STOP_IDS + 1, 1)):
        params = params_of(all_stop_token_ids=set(range(count)))
        values = values_of(params=params, relaxed_topk=4, relaxed_delta=0.5)
        assert values["relaxed_topk"] == topk
        assert (values["relaxed_limit"] > 0) == (topk == 4)
        assert list(values["stop_ids"]) == (list(range(count)) if topk == 4 else [])


@pytest.mark.parametrize(("min_tokens", "topk"), [(0, 4), (4, 1)])
def test_ignored_stop_ids_with_min_tokens_are_verified_strictly(min_tokens: int, topk: int) -> None:
    """As in the embedded executor."""
    params = params_of(
        ignore_eos=True, min_tokens=min_tokens, stop_token_ids=[9], all_stop_token_ids={9, 3}
    )
    values = values_of(params=params, relaxed_topk=4, relaxed_delta=0.5)
    assert values["relaxed_topk"] == topk
    assert set(values["stop_ids"]) == ({9} if min_tokens else {3, 9})


def test_stop_ids_that_vllm_accepts_end_no_engine() -> None:
    assert values_of(params=params_of(all_stop_token_ids={True}))["stop_ids"] == (1,)


# ---- counts of drafts


def counts(
    counter: DraftCounter,
    proposed: int,
    accepted: int,
    invalid: int = 0,
    count: int = 1,
    **extra: Any,
) -> int | None:
    """The number of drafts that vLLM counts as proposed in a step of ``count`` requests with the
    same options; None: the step is not counted."""
    names = [str(number) for number in range(count)]
    requests = {}
    for name in names:
        args = {f"mtp_{key}": value for key, value in extra.items()}
        params = SimpleNamespace(extra_args=args)
        requests[name] = SimpleNamespace(request_id=name, sampling_params=params)
        counter.add(requests[name])
    step = SimpleNamespace(
        scheduled_spec_decode_tokens={name: [7] * proposed for name in names if proposed},
        num_invalid_spec_tokens=dict.fromkeys(names, invalid) if invalid else None,
    )
    output = SimpleNamespace(sampled_token_ids=[[7] * (accepted + 1)] * count)
    withheld = counter.correct(requests, step, output)
    if withheld:
        return None
    return proposed - (step.num_invalid_spec_tokens or {}).get("0", 0)


@pytest.mark.parametrize(
    ("extra", "proposed", "invalid", "expected"),
    [
        ({}, 3, 0, 3),
        ({"max_draft_len": 3}, 3, 0, 3),
        ({"max_draft_len": 2}, 3, 0, 2),
        ({"max_draft_len": 2}, 1, 0, 1),
        ({"max_draft_len": 0}, 3, 0, None),
        ({"speculate": False}, 3, 0, None),
        ({"speculate": False}, 3, 2, None),
        ({"speculate": False}, 0, 0, 0),
        ({}, 3, 2, 1),
        # the first of the drafts is valid and allowed
        ({"max_draft_len": 1}, 3, 2, 1),
        ({"max_draft_len": 2}, 3, 1, 2),
        ({"max_draft_len": 2}, 3, 2, 1),
        ({"max_draft_len": 9}, 3, 0, 3),  # wrong, by a way without a check
    ],
)
def test_withheld_drafts_are_not_counted(
    extra: dict[str, Any], proposed: int, invalid: int, expected: int | None
) -> None:
    assert counts(DraftCounter(SETTINGS), proposed, 0, invalid, **extra) == expected


def test_limits_of_finished_requests_are_forgotten() -> None:
    counter = DraftCounter(SETTINGS)
    counts(counter, 3, 0, max_draft_len=1)
    step = SimpleNamespace(
        scheduled_spec_decode_tokens={"0": [7] * 3, "1": [7] * 3}, num_invalid_spec_tokens=None
    )
    counter.correct({"1": None}, step, SimpleNamespace(sampled_token_ids=[[7], [7]]))
    assert step.num_invalid_spec_tokens is None
    counts(counter, 3, 0, max_draft_len=1)
    assert counts(counter, 3, 0) == 3  # a request of the same id, without a limit


def test_a_turn_of_a_session_has_its_own_limit_when_it_begins() -> None:
    """vLLM queues later turns, and replaces the parameters of the first request by theirs."""
    counter = DraftCounter(SETTINGS)
    turns = [
        SimpleNamespace(request_id="0", resumable=resumable, sampling_params=params)
        for resumable, params in (
            (True, SimpleNamespace(extra_args={"mtp_max_draft_len": 2})),
            (True, SimpleNamespace(extra_args={"mtp_speculate": False})),
            (False, SimpleNamespace(extra_args=None)),  # the end of its input
        )
    ]

    def step(requests: dict[str, Any]) -> tuple[set[str], Any]:
        output = SimpleNamespace(sampled_token_ids=[[7]] * len(requests))
        drafts = {name: [7] * 3 for name in requests}
        scheduled = SimpleNamespace(
            scheduled_spec_decode_tokens=drafts, num_invalid_spec_tokens=None
        )
        return counter.correct(requests, scheduled, output), scheduled.num_invalid_spec_tokens

    for turn in turns:
        counter.add(turn)
    session = turns[0]
    assert step({"0": session}) == (set(), {"0": 1})
    session.sampling_params = turns[1].sampling_params
    assert step({"0": session}) == ({"0"}, {"0": 3})
    assert step({}) == (set(), None)
    counter.add(turns[2])  # the id, of another request
    assert step({"0": turns[2]}) == (set(), None)


def test_wrong_options_inside_the_engine_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A worker or scheduler that raises ends the engine."""
    reader = AdmittedOptions(SETTINGS)
    for wrong in ({"mtp_max_draft_len": 9}, {"mtp_x": 1}, [1]):
        assert reader.read(wrong) == RequestOptions()
    assert reader.read({"mtp_max_draft_len": 2}).max_draft_len == 2
    (record,) = caplog.records
    assert record.name == "vllm.mtp_plugin"
    assert "num_speculative_tokens = 3, got 9" in record.getMessage()


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage()[:20] for record in caplog.records]


def test_collapsed_acceptance_is_logged_once_where_vllm_logs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counter = DraftCounter(SETTINGS)
    with caplog.at_level(logging.INFO):
        for _ in range(2 * COLLAPSE_STEPS):
            counts(counter, 3, 0)
        (record,) = caplog.records
        for _ in range(COLLAPSE_STEPS):
            counts(counter, 3, 2)
    assert record.name == "vllm.mtp_plugin"
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("acceptance collapsed: 1.000 tokens per step")
    assert record.getMessage().endswith("Do the MTP weights belong to this target?")
    assert messages(caplog) == ["acceptance collapsed", "acceptance recovered"]


def test_collapsed_acceptance_of_other_drafters_does_not_name_mtp(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for drafter in ("ngram", "eagle"):
        counts(DraftCounter(replace(COUPLED, drafter=drafter)), 3, 0, count=COLLAPSE_STEPS)
    ends = [record.getMessage().partition("nothing. ")[2] for record in caplog.records]
    assert ends == [
        "Do outputs repeat parts of their prompts?",
        "Does the draft model belong to this target?",
    ]


@pytest.mark.parametrize(
    ("extra", "proposed", "invalid"),
    [
        ({}, 3, 3),
        ({"speculate": False}, 3, 0),
        ({"max_draft_len": 1}, 3, 3),
    ],
)
def test_steps_that_verify_no_draft_raise_no_alarm(
    caplog: pytest.LogCaptureFixture, extra: dict[str, Any], proposed: int, invalid: int
) -> None:
    counter = DraftCounter(SETTINGS)
    for _ in range(2 * COLLAPSE_STEPS):
        counts(counter, proposed, 0, invalid, **extra)
    for _ in range(COLLAPSE_STEPS - 1):
        counts(counter, 3, 0)
    assert not caplog.records


def test_synthetic_acceptance_raises_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    counter = DraftCounter(SYNTHETIC)
    for _ in range(2 * COLLAPSE_STEPS):
        assert counts(counter, 3, 0) == 3
    assert not caplog.records


def test_only_engines_with_drafts_have_a_counter() -> None:
    assert counter_of(make_config()) is not None
    for changes in ({"additional_config": {}}, {"speculative_config": None}):
        assert counter_of(make_config(**changes)) is None
