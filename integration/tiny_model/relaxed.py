"""Measure relaxed acceptance on the tiny model; writes `results/relaxed-tiny_model.json`.

python -m integration.tiny_model.relaxed [--tokens N] [--out FILE]

Every prompt, whole and cut to two thirds and to one third, is in its thinking phase from the first
token on. In addition to the acceptance length, the script reports the share of tokens that are the
target's argmax after the tokens before them, and the number of tokens before the output differs
from that of strict verification.
"""

import argparse
import json
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from integration.bench.machine import describe_machine
from mtp_plugin.hosts.embedded import LLM, SamplingParams
from mtp_plugin.hosts.embedded.models import load_model

HERE = Path(__file__).parent
CHECKPOINT = HERE / "checkpoint"
RESULT = HERE.parent / "results" / "relaxed-tiny_model.json"
NUM_DRAFTS, NUM_TOKENS = 3, 96
BEGIN, END = 1, 2


class Setting(NamedTuple):
    """Options of relaxed acceptance."""

    topk: int
    delta: float


STRICT = Setting(1, 0.0)
SETTINGS = (
    STRICT,
    Setting(2, 0.2),
    Setting(3, 0.4),
    Setting(10, 0.6),
    Setting(10, 0.9),
)


def measure(
    num_tokens: int = NUM_TOKENS, settings: tuple[Setting, ...] = SETTINGS
) -> dict[str, Any]:
    """Return the document of a run; `matched`: strict output equals the target's own."""
    prompts = [item["prompt"] for item in json.loads((HERE / "prompts.json").read_text())]
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    whole = [tokenizer.encode(prompt) for prompt in prompts]
    ids = [[BEGIN, *each[: len(each) * part // 3]] for part in (3, 2, 1) for each in whole]
    target = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    model = load_model(CHECKPOINT, num_mtp_layers=NUM_DRAFTS)
    rows = []
    strict: list[list[int]] = []
    for setting in settings:
        config = {
            "model": str(CHECKPOINT),
            "device": "cpu",
            "max_batch_size": len(ids),
            "speculative_config": {
                "decoding_type": "MTP",
                "max_draft_len": NUM_DRAFTS,
                "use_relaxed_acceptance_for_thinking": True,
                "relaxed_topk": setting.topk,
                "relaxed_delta": setting.delta,
                "begin_thinking_phase_token": BEGIN,
                "end_thinking_phase_token": END,
            },
        }
        with LLM(config, model=model) as llm:
            params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
            texts = [output.token_ids for output in llm.generate(ids, params)]
            length = llm.executor.acceptance.acceptance_length
        strict = strict or texts
        own = [first_choices(target, prompt, text) for prompt, text in zip(ids, texts, strict=True)]
        rows.append(
            {
                **setting._asdict(),
                "acceptance_length": length,
                "first_choice_share": sum(map(sum, own)) / (num_tokens * len(texts)),
                "tokens_before_another": sum(map(shared, texts, strict)) / len(texts),
            }
        )
    return {
        "kind": "relaxed",
        "machine": describe_machine(torch.device("cpu")),
        "matched": rows[0]["first_choice_share"] == 1.0,
        "prompts": len(ids),
        "tokens": num_tokens,
        "draft_len": NUM_DRAFTS,
        "settings": rows,
    }


@torch.inference_mode()
def first_choices(target: Any, prompt: list[int], text: list[int]) -> list[bool]:
    """Return for every token whether it is the target's argmax after the tokens before it."""
    logits = target(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
    return (logits.argmax(dim=-1) == torch.tensor(text)).tolist()


def shared(text: list[int], other: list[int]) -> int:
    """Return the number of tokens before the first difference."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=True))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(arguments.tokens)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
