"""The thinking model: its problems, its training and what is measured with it."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from integration.thinking_model.measure import (
    COUPLED,
    OFF,
    OFF_SAMPLED,
    RELAXED,
    STRICT,
    AnswerReader,
    MeasurementError,
    Workload,
    check_lossless,
    make_llm,
    measure,
    table,
)
from integration.thinking_model.problems import BEGIN, END, END_OF_TEXT, TASKS, Problem, problems
from integration.thinking_model.tokenizer import SPECIAL_TOKENS
from integration.thinking_model.train import Recipe, train
from tests.conftest import once_per_run  # noqa: F401

BATCH, MAX_TOKENS = 2, 20
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def items() -> list[Problem]:
    return list(islice(problems(5, held_out=True), 200))


@pytest.fixture(scope="module")
def checkpoint(once_per_run) -> Path:  # noqa: F811
    """A model of a few training steps: its texts are noise, its files are those of a long run."""

    def make(folder: Path) -> str:
        out = folder / "thinking_model"
        small = {"layers": 2, "hidden_size": 64, "intermediate_size": 96, "batch_size": 4}
        report = train(Recipe(steps=8, problems=80, **small), out)
        history = report["history"]
        assert report["steps"] == 8
        assert history[-1]["main_loss"] < history[0]["main_loss"] - 0.2
        assert history[-1]["draft_losses"][2] < history[0]["draft_losses"][2] - 0.2
        return str(out / "checkpoint")

    return Path(once_per_run("thinking_model", make))


def numbers_of(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


@pytest.mark.parametrize("task", TASKS)
def test_answers_follow_from_the_questions(task, items):
    found = [item for item in items if item.task == task]
    assert len(found) > 20
    for item in found:
        numbers = numbers_of(item.question)
        if task == "sum":
            assert item.answer == str(sum(numbers))
        elif task == "product":
            assert item.answer == str(numbers[0] * numbers[1])
        elif task == "remainder":
            assert item.answer == str(numbers[0] % numbers[1])
        elif task == "sort":
            assert item.answer == " ".join(map(str, sorted(numbers)))
        else:
            assert item.answer == "none" or numbers_of(item.answer)


def test_equations_of_the_steps_are_true(items):
    equations = [
        equation
        for item in items
        for equation in re.findall(r"(\d+(?:[-+*]\d+)+)(?:=| is | makes )(\d+)", item.steps)
    ]
    assert len(equations) > 150
    assert all(eval(left) == int(right) for left, right in equations)


def test_splits_share_no_question(items):
    training = {item.question for item in islice(problems(5, held_out=False), 3000)}
    assert not training & {item.question for item in items}


def test_tags_are_special_tokens_and_digits_are_single(checkpoint, items):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert [tokenizer.convert_tokens_to_ids(each) for each in SPECIAL_TOKENS] == [0, 1, 2]
    for item in items[:20]:
        ids, prompt = tokenizer.encode(item.text), tokenizer.encode(item.prompt)
        assert ids[: len(prompt)] == prompt
        assert tokenizer.decode(ids) == item.text
        assert (ids.count(1), ids.count(2), ids[-1]) == (1, 1, 0)
        tokens = tokenizer.convert_ids_to_tokens(ids)
        digits = [token for token in tokens if re.search(r"\d", token)]
        assert all(len(digit) == 1 for digit in digits)
    chat = [{"role": "user", "content": items[0].question}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == items[0].prompt


def test_answer_is_the_text_after_the_thinking_phase(checkpoint, items):
    answers = AnswerReader(checkpoint)
    for item in items[:20]:
        output = item.text.removeprefix(item.prompt)
        assert answers.read(answers.encode(output)) == item.answer
        assert answers.read(answers.encode(output.replace(END, BEGIN))) is None
        wrong = output.replace(END_OF_TEXT, f"1{END_OF_TEXT}")
        assert answers.read(answers.encode(wrong)) != item.answer


def test_measurement_compares_before_it_reports(checkpoint, items):
    document = measure(Workload(checkpoint, items[:4], BATCH, MAX_TOKENS))
    assert document["lossless"] == {
        "strict": {"equal": 4, "ties": 0},
        "coupled": {"equal": 4, "ties": 0},
    }
    rows = {(row["setting"], row["temperature"]): row for row in document["settings"]}
    assert len(rows) == 8
    strict, widest = rows[STRICT.name, 0.0], rows[RELAXED[-1].name, 0.0]
    assert strict["same_outputs"] == rows[OFF.name, 0.0]["same_outputs"] == 4
    assert widest["acceptance_length"] > strict["acceptance_length"] > 1
    assert widest["same_outputs"] < 4
    assert rows[OFF_SAMPLED.name, 0.6]["same_outputs"] == rows[COUPLED.name, 0.6]["same_outputs"]
    assert len(table(document).splitlines()) == 11


class WithoutTag(Problem):
    """A problem whose prompt does not begin the thinking phase."""

    @property
    def prompt(self) -> str:
        return f"{self.question}\n"


def test_only_the_thinking_phase_is_relaxed(checkpoint, items):
    """Without the tag that begins it, the widest setting gives the output of strict."""
    thinking = items[:BATCH]
    plain = [WithoutTag(each.task, each.question, each.steps, each.answer) for each in thinking]
    with make_llm(checkpoint, BATCH, drafts=True) as llm:
        found = {
            (setting, name): Workload(checkpoint, batch, BATCH, MAX_TOKENS).solve(llm, setting)
            for name, batch in (("thinking", thinking), ("plain", plain))
            for setting in (STRICT, RELAXED[-1])
        }
    outputs = {key: solved.outputs for key, solved in found.items()}
    assert outputs[STRICT, "plain"] == outputs[RELAXED[-1], "plain"]
    assert outputs[STRICT, "thinking"] != outputs[RELAXED[-1], "thinking"]


def test_a_changed_token_is_detected(checkpoint, items):
    work = Workload(checkpoint, items[:2], BATCH, MAX_TOKENS)
    with make_llm(checkpoint, BATCH, drafts=False) as llm:
        plain, sampled = (work.solve(llm, each) for each in (OFF, OFF_SAMPLED))
    for solved in (plain, sampled):
        kept, output = solved.outputs
        changed = [*output[:3], (output[3] + 1) % 256, *output[4:]]
        for other in (changed, output[:-1]):
            with pytest.raises(MeasurementError, match="problem 1 differs"):
                check_lossless(solved, replace(solved, outputs=[kept, other]), work)
