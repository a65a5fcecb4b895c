"""A verification method of its own: accept a draft among the target's two most probable tokens.

Run ``python -m integration.examples.top2`` to compare it with ``coupled`` on the tiny model.

A package registers it in every process, as vLLM's workers need, by an entry point::

    [project.entry-points."mtp_plugin.verifications"]
    top2 = "integration.examples.top2:Top2Verification"
"""

from __future__ import annotations

import sys

import torch

from mtp_plugin import LLM, CustomVerification, SamplingParams, register_verification


class Top2Verification(CustomVerification):
    description = "accept a draft among the two most probable tokens of the target"

    def num_accepted(
        self, logits: torch.Tensor, draft_tokens: torch.Tensor, target_tokens: torch.Tensor
    ) -> torch.Tensor:
        top2 = logits[:, :-1].topk(2, dim=-1).indices  # [G, K, 2]
        in_top2 = (top2 == draft_tokens.unsqueeze(-1)).any(dim=-1)
        is_target = draft_tokens == target_tokens[:, :-1]
        return (in_top2 | is_target).to(torch.int32).cumprod(dim=1).sum(dim=1)


def main(checkpoint: str = "integration/tiny_model/checkpoint") -> None:
    register_verification("top2", Top2Verification())
    speculative_config = {
        "decoding_type": "MTP",
        "max_draft_len": 3,
        "mtp": {"verification": ["coupled", "top2"]},
    }
    params = [SamplingParams(max_tokens=64, verification=name) for name in ("coupled", "top2")]
    with LLM(checkpoint, speculative_config=speculative_config) as llm:
        for output in llm.generate(["class HTTPServer:\n"] * 2, params):
            sys.stdout.write(f"{output.acceptance}\n{output.text}\n")


if __name__ == "__main__":
    main()
