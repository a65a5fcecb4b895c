"""A drafter of its own: prompt lookup, which copies what followed the last tokens earlier.

Run ``python -m integration.examples.lookup`` to see how many tokens a step outputs.

A package registers it in every process by an entry point::

    [project.entry-points."mtp_plugin.drafters"]
    lookup = "integration.examples.lookup:LookupDrafter"
"""

from __future__ import annotations

import sys

import torch

from mtp_plugin import LLM, CustomDrafter, SamplingParams, register_drafter
from mtp_plugin.ops import look_up_drafts


class LookupDrafter(CustomDrafter):
    def propose(self, tokens: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
        return look_up_drafts(tokens, lengths, k, min_match=2)


def main(checkpoint: str = "integration/tiny_model/checkpoint") -> None:
    register_drafter("lookup", LookupDrafter())
    with LLM(checkpoint, speculative_config={"decoding_type": "lookup", "max_draft_len": 3}) as llm:
        (output,) = llm.generate(["class HTTPServer:\n"], SamplingParams(max_tokens=64))
        sys.stdout.write(f"{output.acceptance}\n{output.text}\n")


if __name__ == "__main__":
    main()
