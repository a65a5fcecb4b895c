"""``vllm serve`` with the ``openai`` client."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")


@pytest.mark.engines("k0", "server")
def test_seed_gives_the_same_text_over_http(results):
    expected = [output["completions"]["0"]["text"] for output in results("k0")["few"]["outputs"]]
    assert [output["text"] for output in results("server")["few"]["outputs"]] == expected


@pytest.mark.engines("server")
def test_unknown_option_of_a_request_gives_http_400(results):
    (answer,) = results("server")["refused"]["outputs"]
    assert answer["status"] == 400
    assert "mtp_plugin has no request options, got mtp_relaxed_topk" in answer["error"]
