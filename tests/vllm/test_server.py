"""``vllm serve`` with the ``openai`` client."""

from __future__ import annotations

import pytest

from tests.vllm.engines import BIASED_OPTIONS
from tests.vllm.options import KEPT, WRONG_XARGS

pytest.importorskip("vllm")


@pytest.mark.engines("k0", "server")
def test_seed_gives_the_same_text_over_http(results):
    expected = [output["completions"]["0"]["text"] for output in results("k0")["few"]["outputs"]]
    assert [output["text"] for output in results("server")["few"]["outputs"]] == expected


@pytest.mark.engines("k0", "server")
def test_withheld_drafts_do_not_change_the_text_over_http(results):
    expected = [output["completions"]["0"]["text"] for output in results("k0")["few"]["outputs"]]
    assert [output.get("text") for output in results("server")["options"]["outputs"]] == expected


@pytest.mark.engines("k0", "server")
def test_min_p_and_logit_bias_give_the_text_without_drafts_over_http(results):
    outputs = results("k0")["options sampled"]["outputs"]
    expected = [outputs[list(KEPT).index(o)]["completions"]["0"]["text"] for o in BIASED_OPTIONS]
    assert [each.get("text") for each in results("server")["biased"]["outputs"]] == expected


@pytest.mark.engines("server")
def test_methods_of_requests_are_accepted_over_http(results):
    assert all(output.get("text") for output in results("server")["methods"]["outputs"])


@pytest.mark.engines("server")
@pytest.mark.parametrize("number", range(len(WRONG_XARGS)))
def test_wrong_option_of_a_request_gives_http_400(results, number):
    answer = results("server")["refused"]["outputs"][number]
    assert answer["status"] == 400
    assert f"extra_args: {WRONG_XARGS[number][1]}" in answer["error"]
