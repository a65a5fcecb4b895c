"""Measure relaxed acceptance on answers; writes `results/relaxed-thinking_model.json`.

    python -m integration.thinking_model.measure [--problems N] [--batch B] [--out FILE]

The embedded executor solves the same held-out problems with each setting. An answer is correct if
it equals the expected one exactly. Before any number is reported, the outputs of strict and coupled
verification must equal those without drafts, token for token.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from integration.bench.machine import describe_machine, store
from integration.thinking_model.problems import BEGIN, END, Problem, problems
from mtp_plugin import LLM, SamplingParams
from mtp_plugin.config import LLMConfig
from mtp_plugin.hosts.embedded.models import LoadedModel, load_model
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats
from mtp_plugin.tools.check import PromptResult, Reference

HERE = Path(__file__).parent
CHECKPOINT = HERE / "checkpoint"
RESULT = HERE.parent / "results" / "relaxed-thinking_model.json"
NUM_DRAFTS, MAX_SEQ_LEN = 3, 320
TEMPERATURE = 0.6
HELD_OUT_SEED = 10_000_000
Z95 = 1.96
"""Standard errors to each side of a 95 % interval."""
TIE = 1e-4
"""Scores in float32 that are closer than this may swap when additions are ordered differently."""


class MeasurementError(RuntimeError):
    """The outputs contradict what the measurement relies on."""


@dataclass(frozen=True)
class Setting:
    """A verification method; `topk` 0: strict, or sampled with coupled verification."""

    name: str
    topk: int = 0
    delta: float = 0.0
    temperature: float = 0.0
    drafts: bool = True

    def params(self, index: int, max_tokens: int) -> SamplingParams:
        """Options of the request with the problem of that index."""
        params = SamplingParams(
            max_tokens=max_tokens, temperature=self.temperature, detokenize=False
        )
        if self.temperature:
            params = replace(params, seed=index)
        if not self.drafts:
            return params
        if not self.topk:
            return replace(params, relaxed_acceptance=False)
        return replace(params, relaxed_topk=self.topk, relaxed_delta=self.delta)


OFF = Setting("no drafts", drafts=False)
STRICT = Setting("strict")
RELAXED = tuple(
    Setting(f"relaxed {topk}, {delta:g}", topk, delta)
    for topk, delta in ((2, 0.2), (3, 0.4), (10, 0.6), (10, 0.9))
)
OFF_SAMPLED = Setting("no drafts", temperature=TEMPERATURE, drafts=False)
COUPLED = Setting("coupled", temperature=TEMPERATURE)


@dataclass(frozen=True)
class Solved:
    """Outputs of a setting."""

    setting: Setting
    outputs: list[list[int]]
    correct: list[bool]
    acceptance: AcceptanceStats

    @property
    def num_tokens(self) -> int:
        """Output tokens."""
        return sum(map(len, self.outputs))


# --- run ---


def make_llm(checkpoint: Path, batch: int, *, drafts: bool) -> LLM:
    """Return an executor in float32, in which greedy outputs do not depend on the batch."""
    config: dict[str, Any] = {
        "model": str(checkpoint),
        "dtype": "float32",
        "max_batch_size": batch,
        "max_num_tokens": max(2048, batch * (NUM_DRAFTS + 1)),
        "max_seq_len": MAX_SEQ_LEN,
        "speculative_config": None,
        "cuda_graph_config": None,
    }
    if torch.cuda.is_available():
        sizes = sorted({max(1, batch // 4), max(1, batch // 2), batch})
        config["cuda_graph_config"] = {"batch_sizes": sizes, "enable_padding": True}
    if drafts:
        config["speculative_config"] = {
            "decoding_type": "MTP",
            "max_draft_len": NUM_DRAFTS,
            "use_relaxed_acceptance_for_thinking": True,
            # requests set their own
            "relaxed_topk": RELAXED[0].topk,
            "relaxed_delta": RELAXED[0].delta,
            "mtp": {
                "verification": "coupled",
                "begin_thinking_phase": BEGIN,
                "end_thinking_phase": END,
            },
        }
    return LLM(config)


@dataclass(frozen=True)
class Workload:
    """The problems, and how they are run."""

    checkpoint: Path
    items: list[Problem]
    batch: int
    max_tokens: int = 192

    @cached_property
    def answers(self) -> AnswerReader:
        """Tokenizer of the checkpoint."""
        return AnswerReader(self.checkpoint)

    def solve(self, llm: LLM, setting: Setting) -> Solved:
        """Solve all problems with a setting."""
        prompts = [self.answers.encode(item.prompt) for item in self.items]
        params = [setting.params(index, self.max_tokens) for index in range(len(prompts))]
        found = llm.generate(prompts, params, use_tqdm=False)
        stats = AcceptanceStats(NUM_DRAFTS if setting.drafts else 0)
        for output in found:
            stats.merge(output.outputs[0].acceptance)
        outputs = [list(output.outputs[0].token_ids) for output in found]
        correct = [
            self.answers.read(ids) == item.answer
            for ids, item in zip(outputs, self.items, strict=True)
        ]
        return Solved(setting, outputs, correct, stats)


class AnswerReader:
    """Reads the answer of an output: the text after the thinking phase."""

    def __init__(self, checkpoint: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
        self._end: int = self._tokenizer.convert_tokens_to_ids(END)

    def read(self, ids: list[int]) -> str | None:
        """Return the answer; None: the thinking phase did not end."""
        if self._end not in ids:
            return None
        answer = ids[ids.index(self._end) + 1 :]
        text: str = self._tokenizer.decode(answer, skip_special_tokens=True)
        return text.strip()

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt."""
        ids: list[int] = self._tokenizer.encode(prompt)
        return ids


# --- losslessness ---


def check_lossless(plain: Solved, drafted: Solved, work: Workload) -> dict[str, int]:
    """Compare outputs with those without drafts; returns the number of equal ones and of ties.

    Raises:
        MeasurementError: an output differs, and not by a tie of two tokens.
    """
    pairs = list(zip(plain.outputs, drafted.outputs, strict=True))
    differ = [index for index, (a, b) in enumerate(pairs) if a != b]
    if differ:
        model = load_model(work.checkpoint, num_mtp_layers=1)
        for index in differ:
            params = plain.setting.params(index, work.max_tokens)
            prompt = work.answers.encode(work.items[index].prompt)
            gap = gap_of_first_difference(model, params, prompt, *pairs[index])
            if not gap <= TIE:
                raise MeasurementError(
                    f"{drafted.setting.name}: the output of problem {index} differs from decoding "
                    f"without drafts; gap of the two tokens: {gap:.1e}, expected at most {TIE}"
                )
    return {"equal": len(pairs) - len(differ), "ties": len(differ)}


def gap_of_first_difference(
    model: LoadedModel,
    params: SamplingParams,
    prompt: list[int],
    plain: list[int],
    drafted: list[int],
) -> float:
    """Return how far apart the scores of the first two different tokens are in the reference."""
    shared = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(plain, drafted, strict=False))
    )
    reference = Reference(model, params, MAX_SEQ_LEN, LLMConfig(model=str(CHECKPOINT)))
    result = PromptResult(prompt, drafted, "", FinishReason.LENGTH, AcceptanceStats(0))
    gap = reference.measure(result, plain, shared).gap
    return math.inf if gap is None else abs(gap)


# --- report ---


def margin(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of a mean."""
    n = len(values)
    mean = sum(values) / n
    variance = sum((value - mean) ** 2 for value in values) / max(1, n - 1)
    return Z95 * math.sqrt(variance / n)


def describe(solved: Solved, reference: Solved, items: Sequence[Problem]) -> Any:
    """Return the row of a setting.

    Args:
        reference: lossless output at the same temperature; accuracies are compared in pairs.
    """
    n = len(items)
    difference = [
        float(a) - float(b) for a, b in zip(solved.correct, reference.correct, strict=True)
    ]
    by_task: dict[str, list[bool]] = {}
    for ok, item in zip(solved.correct, items, strict=True):
        by_task.setdefault(item.task, []).append(ok)
    return {
        "setting": solved.setting.name,
        "topk": solved.setting.topk,
        "delta": solved.setting.delta,
        "temperature": solved.setting.temperature,
        "drafts": NUM_DRAFTS if solved.setting.drafts else 0,
        "accuracy": sum(solved.correct) / n,
        "accuracy_margin": margin([float(each) for each in solved.correct]),
        "difference": sum(difference) / n,
        "difference_margin": margin(difference),
        "acceptance_length": solved.acceptance.acceptance_length if solved.setting.drafts else 1.0,
        "acceptance_per_position": solved.acceptance.per_position,
        "mean_tokens": solved.num_tokens / n,
        "same_outputs": sum(a == b for a, b in zip(solved.outputs, reference.outputs, strict=True)),
        "accuracy_by_task": {task: sum(each) / len(each) for task, each in sorted(by_task.items())},
    }


def measure(work: Workload) -> dict[str, Any]:
    """Return the document of a run.

    Raises:
        MeasurementError: lossless verification changed an output.
    """
    with make_llm(work.checkpoint, work.batch, drafts=False) as llm:
        off, off_sampled = (work.solve(llm, each) for each in (OFF, OFF_SAMPLED))
    with make_llm(work.checkpoint, work.batch, drafts=True) as llm:
        device = llm.device
        strict, coupled = (work.solve(llm, each) for each in (STRICT, COUPLED))
        lossless = {
            "strict": check_lossless(off, strict, work),
            "coupled": check_lossless(off_sampled, coupled, work),
        }
        relaxed = [work.solve(llm, each) for each in RELAXED]
    items = work.items
    greedy = [describe(each, strict, items) for each in (off, strict, *relaxed)]
    sampled = [describe(each, off_sampled, items) for each in (off_sampled, coupled)]
    return {
        "kind": "relaxed",
        "machine": describe_machine(device),
        "model": {"dtype": "float32", "draft_len": NUM_DRAFTS, "batch": work.batch},
        "problems": len(items),
        "matched": all(each["equal"] + each["ties"] == len(items) for each in lossless.values()),
        "lossless": lossless,
        "settings": [*greedy, *sampled],
    }


def table(document: dict[str, Any]) -> str:
    """Return the result as lines of text."""
    lines = [f"{'setting':<16} {'T':>4} {'accuracy':>15} {'difference':>15}    AL"]
    for row in document["settings"]:
        accuracy = f"{row['accuracy']:.1%} +- {row['accuracy_margin']:.1%}"
        difference = f"{row['difference']:+.1%} +- {row['difference_margin']:.1%}"
        lines.append(
            f"{row['setting']:<16} {row['temperature']:>4} {accuracy:>15} {difference:>15}  "
            f"{row['acceptance_length']:.2f}"
        )
    for row in document["settings"][:1]:
        lines.append(" ".join(f"{k} {v:.1%}" for k, v in row["accuracy_by_task"].items()))
    lines.append(f"equal to decoding without drafts: {document['lossless']}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--problems", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    items = list(islice(problems(HELD_OUT_SEED, held_out=True), args.problems))
    document = measure(Workload(args.checkpoint, items, args.batch))
    store(args.out, document)
    print(table(document))  # noqa: T201


if __name__ == "__main__":
    main()
