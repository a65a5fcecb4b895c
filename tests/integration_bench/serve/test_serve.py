"""``python -m integration.bench serve`` on a CPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from integration.bench.case import BenchmarkError
from integration.bench.cli import app
from integration.bench.serve import run as command
from integration.bench.serve.client import parse_stream, parse_whole, unchunked
from integration.bench.serve.run import OFFLINE, STREAM, WHOLE
from integration.bench.serve.tokenizer import make_tokenizer


@pytest.fixture
def bench(tmp_path):
    """Run the command; return its result and its JSON document."""

    def invoke(*arguments: str):
        path = tmp_path / "serving.json"
        sizes = "--concurrency 4 --requests 6 --isl 8 --osl 12 --clients 2 --rounds 1"
        options = ["--shape", "toy", "--device", "cpu", "--dtype", "float32"]
        result = CliRunner().invoke(
            app, ["serve", *options, *sizes.split(), *arguments, "--output", str(path)]
        )
        return result, json.loads(path.read_text()) if path.exists() else None

    return invoke


def test_serve_outputs_equal_offline_and_rates_are_reported(bench) -> None:
    result, report = bench("--text", "--residual-scale", "0.2")
    assert result.exit_code == 0, result.output
    assert "not a benchmark" in result.stdout
    assert report["matched"] is True
    assert report["match"]["tokens"] == 3 * 6 * 12
    assert report["equal_requests"] == {OFFLINE: [6], WHOLE: [6], STREAM: [6]}
    rates = report["tokens_per_second"]
    assert rates.keys() == {OFFLINE, WHOLE, STREAM}
    for mode in (WHOLE, STREAM):
        assert report["ratio_to_offline"][mode] == pytest.approx(rates[mode] / rates[OFFLINE])
    assert report["acceptance_length"] > 1.5
    assert 1 <= report["tokens_per_chunk"] <= 12


def test_serve_different_output_reports_no_numbers(bench, monkeypatch) -> None:
    send = command.run_http

    def change_a_token(*arguments, stream: bool):
        timed = send(*arguments, stream=stream)
        if stream:
            timed.token_ids[3][5] ^= 1
        return timed

    monkeypatch.setattr(command, "run_http", change_a_token)
    result, report = bench()
    assert result.exit_code == 1
    assert report["matched"] is False
    assert "request 3, token 6" in report["match"]["mismatches"][0]
    assert "tokens_per_second" not in report
    assert "tok/s" not in result.stdout


def test_serve_missing_tokens_are_refused(bench, monkeypatch) -> None:
    send = command.run_http

    def drop_a_token(*arguments, stream: bool):
        timed = send(*arguments, stream=stream)
        return replace(timed, token_ids=[ids[:-1] for ids in timed.token_ids])

    monkeypatch.setattr(command, "run_http", drop_a_token)
    result, report = bench()
    assert isinstance(result.exception, BenchmarkError)
    assert "expected 12 tokens of each request, got [11" in str(result.exception)
    assert report is None


def test_serve_fewer_requests_than_connections_is_refused(bench) -> None:
    result, _ = bench("--concurrency", "7")
    assert isinstance(result.exception, BenchmarkError)
    assert "clients <= concurrency <= requests, got 2, 7 and 6" in str(result.exception)


def test_client_parses_chunks_across_events() -> None:
    events = b'data: {"choices":[{"token_ids":[1,2]}]}\n\ndata: {"choices":[{"token_ids":[3]}]}\n\n'
    body = b"".join(
        b"%x\r\n%s\r\n" % (len(part), part)
        for part in (events[:11], events[11:], b"data: [DONE]\n\n")
    )
    body += b"0\r\n\r\n"
    assert b"".join(unchunked(body)).startswith(events)
    assert parse_stream(body) == ([1, 2, 3], 2)
    assert parse_whole(b'{"choices":[{"token_ids":[4]}]}') == ([4], 1)


def test_client_error_event_is_refused() -> None:
    event = b'data: {"error":{"message":"no"}}\n\n'
    with pytest.raises(ValueError, match="expected a chunk"):
        parse_stream(b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event))


def test_made_tokenizer_has_a_different_text_for_each_token() -> None:
    tokenizer = make_tokenizer(1000)
    assert len({tokenizer.decode([token]) for token in range(1000)}) == 1000
    assert tokenizer.decode([0, 27]) == " a bb"
