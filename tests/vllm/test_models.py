"""Models with latent attention (DeepSeek-V3) and with recurrent layers (Qwen3.5)."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")


@pytest.mark.engines(*(f"deepseek_v3_k{k}" for k in (0, 1, 2)))
@pytest.mark.parametrize("num_drafts", [1, 2])
def test_drafts_do_not_change_the_output_of_deepseek_v3(results, report, num_drafts):
    compare(results, report, "deepseek_v3", num_drafts, allowed=0)


@pytest.mark.engines(*(f"qwen3_5_k{k}" for k in (0, 1, 2)))
@pytest.mark.parametrize("num_drafts", [1, 2])
def test_drafts_do_not_change_the_output_of_qwen3_5(results, report, num_drafts):
    """In bfloat16, in which the number of rows changes the rounding of logits."""
    compare(results, report, "qwen3_5", num_drafts, allowed=2)


def compare(results, report, model, num_drafts, allowed):
    with_drafts, without = (results(f"{model}_k{k}")["plain"] for k in (num_drafts, 0))
    pairs = [
        (got["tokens"], expected["tokens"])
        for got, expected in zip(with_drafts["outputs"], without["outputs"], strict=True)
    ]
    differing = sum(got != expected for got, expected in pairs)
    drafts = with_drafts["counters"]["spec_decode_num_drafts"]
    accepted = with_drafts["counters"]["spec_decode_num_accepted_tokens"]
    report(
        f"{model}, K = {num_drafts}: {differing} of {len(pairs)} outputs differ; "
        f"{accepted} accepted in {drafts} steps"
    )
    assert drafts > 0
    assert differing <= allowed
