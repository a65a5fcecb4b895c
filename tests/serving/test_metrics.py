"""``/metrics`` and the dashboard."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mtp_plugin import LLM, SamplingParams
from mtp_plugin.serving import server as server_module
from mtp_plugin.serving import settings as settings_module
from mtp_plugin.serving.metrics import Throughput
from tests.serving.conftest import Running, running, wait_until

DASHBOARD = Path(settings_module.__file__).parent / "grafana.json"
VLLM = """
    vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc
    vllm:num_preemptions_total vllm:prompt_tokens_total vllm:generation_tokens_total
    vllm:time_to_first_token_seconds_bucket vllm:inter_token_latency_seconds_bucket
    vllm:e2e_request_latency_seconds_bucket vllm:request_success_total
    vllm:spec_decode_num_drafts_total vllm:spec_decode_num_draft_tokens_total
    vllm:spec_decode_num_accepted_tokens_total vllm:spec_decode_num_accepted_tokens_per_pos_total
"""


def samples(server: Running) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    response = server.get("/metrics")
    assert response.headers["Content-Type"].startswith("text/plain; version=")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def total(found: dict, name: str, **labels: str) -> float:
    return sum(v for (n, own), v in found.items() if n == name and labels.items() <= set(own))


def test_counters_agree_with_the_response(server: Running) -> None:
    prefix = "mtp_plugin:"
    before = samples(server)
    answer = server.post("/v1/completions", prompt="class A:\n", max_tokens=40, temperature=0)
    wait_until(lambda: server.service.num_sequences == 0)
    after = samples(server)

    def increase(name: str, **labels: str) -> float:
        return total(after, prefix + name, **labels) - total(before, prefix + name, **labels)

    stats = answer.json()["metrics"]["speculative_decoding"]
    assert increase("spec_decode_num_drafts_total") == stats["num_spec_steps"]
    assert increase("spec_decode_num_draft_tokens_total") == stats["num_draft_tokens"]
    assert increase("spec_decode_num_accepted_tokens_total") == stats["num_accepted_draft_tokens"]
    steps = stats["acceptance_histogram"]
    for position in range(3):
        expected = sum(steps[position + 1 :])
        labels = {"position": str(position)}
        assert increase("spec_decode_num_accepted_tokens_per_pos_total", **labels) == expected
        labels["phase"] = "answer"
        assert increase("spec_decode_num_accepted_tokens_per_phase_total", **labels) == expected
    assert increase("spec_decode_num_drafts_per_phase_total") == stats["num_spec_steps"]
    assert increase("spec_decode_draft_length_count") == 1
    launched = increase("spec_decode_num_steps_per_draft_len_total", draft_len="3")
    # a step that was launched before the last token was read
    assert launched - stats["num_spec_steps"] in (0, 1)
    assert increase("generation_tokens_total") == 40
    assert increase("prompt_tokens_total") == answer.json()["usage"]["prompt_tokens"]
    assert increase("request_success_total", finished_reason="length") == 1
    assert increase("time_to_first_token_seconds_count") == 1
    assert increase("inter_token_latency_seconds_count") == stats["num_spec_steps"]
    assert increase("e2e_request_latency_seconds_count") == 1


def test_names_of_vllm(llm: LLM) -> None:
    with running(llm, metrics_prefix="vllm:") as server:
        server.post("/v1/completions", prompt="a", max_tokens=8, temperature=0)
        found = list(samples(server))
    assert set(VLLM.split()) <= {name for name, _ in found}
    for _, labels in found:
        assert {("model_name", "tiny"), ("engine", "0")} <= labels


def test_alarms_are_metrics(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    alarms = server.service.llm.pieces.alarms
    monkeypatch.setattr(alarms, "collapsed", True)
    monkeypatch.setattr(alarms, "num_collapses", 3)
    found = samples(server)
    assert total(found, "mtp_plugin:spec_decode_collapsed") == 1
    assert total(found, "mtp_plugin_acceptance_alarm_total") == 3
    assert total(found, "mtp_plugin:spec_decode_looping") == 0


def test_queries_of_the_dashboard_name_metrics_that_exist(server: Running) -> None:
    server.post("/v1/completions", prompt="class A:\n", max_tokens=20, temperature=0)
    known: dict[str, set[str]] = {}
    for name, labels in samples(server):
        known.setdefault(name, set()).update(label for label, _ in labels)
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 20
    for query in queries:
        names = re.findall(r"mtp_plugin:\w+", query)
        assert names
        assert set(names) <= set(known), query
        for grouping in re.findall(r"by \((\w+)\)", query):
            assert all(grouping in known[name] for name in names), query
    identifiers = [panel["id"] for panel in dashboard["panels"]]
    assert len(identifiers) == len(set(identifiers))


def test_throughput_is_logged_while_there_are_requests(llm: LLM) -> None:
    throughput = Throughput(llm)
    assert throughput.line() is None
    output = llm.generate("class A:\n", SamplingParams(max_tokens=20))
    length = re.escape(f"{output.acceptance.acceptance_length:.2f} tokens per step")
    pattern = (
        r"[\d.]+ prompt and [1-9][\d.]* output tokens/s, 0 running, 0 waiting, KV cache 0.0%, "
    )
    assert re.match(pattern + length + r", [\d.]+% of drafts accepted", throughput.line() or "")
    assert throughput.line() is None
    assert re.match(
        rf"stopped after 1 sequences, \d+ prompt and 20 .* {length}", throughput.total()
    )


def test_throughput_is_logged_by_the_server(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(server_module, "REPORT_SECONDS", 0.1)
    with running(llm, log=lines.append) as server:
        server.post("/v1/completions", prompt="a", max_tokens=8)
        wait_until(lambda: len(lines) == 2)
        url = server.url
    assert lines[0] == f"serving tiny on {url}"
    assert "output tokens/s" in lines[1]
    assert lines[2].startswith("stopped after 1 sequences")
