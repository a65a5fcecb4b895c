"""Admission of requests, and the alarm on collapsed acceptance."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from mtp_plugin.hosts.vllm.metrics import alarm_of
from mtp_plugin.hosts.vllm.requests import check_request
from mtp_plugin.speculative.metrics.alarms import COLLAPSE_STEPS
from tests.hosts.vllm import fake_vllm
from tests.hosts.vllm.fake_vllm import make_config

MAX_ACCEPTED = 3


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"mtp_speculate": False}, "mtp_speculate"),
        ({"mtp_b": 1, "other": 2, "mtp_a": 1}, "mtp_a, mtp_b"),
    ],
)
def test_unknown_request_options_are_refused(
    monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], named: str
) -> None:
    exceptions = fake_vllm.install(monkeypatch)["vllm.exceptions"]
    with pytest.raises(exceptions.VLLMValidationError, match="extra_args") as error:
        check_request(SimpleNamespace(extra_args=extra))
    assert str(error.value) == (
        f"extra_args: mtp_plugin has no request options, got {named}: leave them out"
    )


@pytest.mark.parametrize("extra", [None, {}, {"kv_transfer_params": {}}, {"my_mtp_": 1}, {3: 1}])
def test_options_of_others_are_left_alone(extra: dict[Any, Any] | None) -> None:
    check_request(SimpleNamespace(extra_args=extra))


def test_pooling_params_have_no_extra_args() -> None:
    check_request(SimpleNamespace())


def test_collapsed_acceptance_is_logged_once_where_vllm_logs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    count = alarm_of(make_config())
    assert count is not None
    with caplog.at_level(logging.INFO):
        for _ in range(2 * COLLAPSE_STEPS):
            count(MAX_ACCEPTED, 0)
        collapsed = list(caplog.records)
        for _ in range(COLLAPSE_STEPS):
            count(MAX_ACCEPTED, 2)
    (record,) = collapsed
    assert record.name == "vllm.mtp_plugin"
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("acceptance collapsed: 1.000 tokens per step")
    assert [each.getMessage()[:20] for each in caplog.records] == [
        "acceptance collapsed",
        "acceptance recovered",
    ]


def test_steps_without_drafts_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    count = alarm_of(make_config())
    assert count is not None
    for _ in range(2 * COLLAPSE_STEPS):
        count(0, 0)
    for _ in range(COLLAPSE_STEPS - 1):
        count(MAX_ACCEPTED, 0)
    assert not caplog.records


def test_accepted_drafts_raise_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    count = alarm_of(make_config())
    assert count is not None
    for step in range(2 * COLLAPSE_STEPS):
        count(MAX_ACCEPTED, int(step % 10 == 0))  # 1.1 tokens per step
    assert not caplog.records


@pytest.mark.parametrize(
    "changes",
    [
        {"additional_config": {}},
        {"speculative_config": None},
        {"speculative_config__rejection_sample_method": "synthetic"},
    ],
)
def test_engines_without_an_alarm(changes: dict[str, Any]) -> None:
    assert alarm_of(make_config(**changes)) is None
