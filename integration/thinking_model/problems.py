"""Synthetic problems with worked solutions: sums, products, remainders, sorting, lists.

A solution has several steps, each in one of several wordings and often in one of several orders, so
that the next token of the thinking phase is uncertain. The answer is unique. The hash of a question
decides whether the problem is held out.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

BEGIN, END, END_OF_TEXT = "<think>", "</think>", "<|endoftext|>"
HELD_OUT_SHARE = 16
"""One of so many questions is held out."""


@dataclass(frozen=True)
class Problem:
    """One question."""

    task: str
    question: str
    steps: str
    answer: str

    @property
    def prompt(self) -> str:
        """The question, and the tag that begins the thinking phase."""
        return f"{self.question}\n{BEGIN}"

    @property
    def text(self) -> str:
        """The prompt with a solution, as the model is trained on it."""
        return f"{self.prompt}{self.steps}{END}{self.answer}{END_OF_TEXT}"

    @property
    def is_held_out(self) -> bool:
        """Whether no training text may contain the question."""
        return zlib.crc32(self.question.encode()) % HELD_OUT_SHARE == 0


Solution = tuple[str, list[str], str]
"""Question, steps, answer."""
WEIGHTS = (4, 3, 2, 1, 1, 1)


def _worded(rng: random.Random, number: int, wordings: Sequence[str]) -> str:
    """Choose a wording; which one is the most probable depends on the last digit of `number`."""
    first = number % 10
    weights = [WEIGHTS[(index + first) % len(wordings)] for index in range(len(wordings))]
    return rng.choices(wordings, weights)[0]


def _sum(rng: random.Random) -> Solution:
    numbers = [rng.randint(1000, 9999) for _ in range(4)]
    shown = ", ".join(map(str, numbers))
    question = rng.choice(["Add {}.", "Sum of {}?", "What is the total of {}?"]).format(shown)
    if rng.random() < 0.5:
        numbers.reverse()
    total, steps = numbers[0], []
    for number in numbers[1:]:
        steps.append(_addition(rng, total, number))
        total += number
    return question, steps, str(total)


def _product(rng: random.Random) -> Solution:
    a, b = rng.randint(101, 999), rng.randint(11, 99)
    question = rng.choice(["Multiply {} by {}.", "{}*{}?", "What is {} times {}?"]).format(a, b)
    parts = [part for part in (b // 10 * 10, b % 10) if part]
    if rng.random() < 0.5:
        parts.reverse()
    steps = []
    for part in parts:
        c = a * part
        steps.append(
            _worded(
                rng,
                a + len(steps),
                [
                    f"Part: {a}*{part}={c}.",
                    f"We get {a}*{part}={c}.",
                    f"Times {part}: {a}*{part}={c}.",
                    f"{part} times {a} is {c}.",
                    f"Multiply: {a}*{part}={c}.",
                ],
            )
        )
    if len(parts) > 1:
        shown = "+".join(str(a * part) for part in parts)
        steps.append(
            _worded(
                rng,
                a * parts[-1],
                [
                    f"Now {shown}={a * b}.",
                    f"All: {shown} is {a * b}.",
                    f"Together {shown} makes {a * b}.",
                ],
            )
        )
    return question, steps, str(a * b)


def _remainder(rng: random.Random) -> Solution:
    a, b = rng.randint(1000, 99999), rng.randint(11, 99)
    question = rng.choice(
        ["Divide {} by {}; what is left?", "Remainder of {} by {}?", "What is {} mod {}?"]
    ).format(a, b)
    steps, rest = [], 0
    for digit in str(a):
        rest = 10 * rest + int(digit)
        if rest < b:
            continue
        times = rest // b
        left = rest - times * b
        steps.append(
            _worded(
                rng,
                rest,
                [
                    f"From {rest}: {rest}-{times}*{b}={left}.",
                    f"It fits {times} times: {rest}-{times * b}={left}.",
                    f"Take {times * b} from {rest}: {left}.",
                    f"{rest} has {times} times {b}, leaves {left}.",
                    f"Now {rest}-{times}*{b}={left}.",
                ],
            )
        )
        rest = left
    return question, steps, str(rest)


def _sort(rng: random.Random) -> Solution:
    numbers = rng.sample(range(10, 100), rng.randint(6, 8))
    question = rng.choice(["Sort {}.", "Put in order: {}.", "Smallest first: {}."])
    halves = {
        "low": [number for number in numbers if number < 50],
        "high": [number for number in numbers if number >= 50],
    }
    steps = []
    for name in rng.sample(list(halves), 2):
        half = halves[name]
        if rng.random() < 0.5:
            half = half[::-1]
        wording = _worded(
            rng,
            numbers[0],
            ["The {n} ones: {l}.", "In the {n} half: {l}.", "Now {n}: {l}.", "I see {n} {l}."],
        )
        steps.append(wording.format(n=name, l=_shown(half)))
    return question.format(_shown(numbers)), steps, _shown(sorted(numbers))


CONDITIONS: dict[str, Callable[[int], bool]] = {
    "even": lambda x: x % 2 == 0,
    "odd": lambda x: x % 2 == 1,
    "large": lambda x: x >= 50,
    "small": lambda x: x < 50,
}
CHANGES: dict[str, Callable[[int], int]] = {
    "double": lambda x: 2 * x,
    "raise by 17": lambda x: x + 17,
    "take from 100": lambda x: 100 - x,
    "triple": lambda x: 3 * x,
}
ENDS: dict[str, Callable[[list[int]], str]] = {
    "reverse": lambda numbers: _shown(numbers[::-1]),
    "sum": lambda numbers: str(sum(numbers)),
    "maximum": lambda numbers: str(max(numbers, default=0)),
    "count": lambda numbers: str(len(numbers)),
}


def _list(rng: random.Random) -> Solution:
    numbers = rng.sample(range(10, 100), rng.randint(5, 7))
    condition, change, end = (rng.choice(list(each)) for each in (CONDITIONS, CHANGES, ENDS))
    question = rng.choice(
        ["Of {l} keep {c} ones, {h}, then {e}.", "In {l}: keep {c}, {h}, {e}."]
    ).format(l=_shown(numbers), c=condition, h=change, e=end)
    kept = [number for number in numbers if CONDITIONS[condition](number)]
    changed = [CHANGES[change](number) for number in kept]
    kept_wording = _worded(
        rng, numbers[0], ["Keep {}.", "So {} remain.", "The {c} ones: {}.", "We have {}."]
    )
    changed_wording = _worded(
        rng, sum(kept[-1:]), ["Then {}.", "After that: {}.", "It gives {}.", "Each: {}."]
    )
    steps = [
        kept_wording.format(_shown(kept), c=condition),
        changed_wording.format(_shown(changed)),
    ]
    return question, steps, ENDS[end](changed)


def _addition(rng: random.Random, a: int, b: int) -> str:
    return _worded(
        rng,
        a,
        [
            f"Now {a}+{b}={a + b}.",
            f"Then {a}+{b} is {a + b}.",
            f"Add {b} to {a}: {a + b}.",
            f"Next: {b}+{a}={a + b}.",
            f"{a} plus {b} makes {a + b}.",
            f"So far {a + b}, that is {a}+{b}.",
        ],
    )


def _shown(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers)) or "none"


TASKS: dict[str, Callable[[random.Random], Solution]] = {
    "sum": _sum,
    "product": _product,
    "remainder": _remainder,
    "sort": _sort,
    "list": _list,
}
REMARKS = ("Good.", "Let me go on.", "One more.", "Fine, next.")


def problems(seed: int, *, held_out: bool) -> Iterator[Problem]:
    """Yield endless problems of all tasks, none of them from the other split."""
    rng = random.Random(seed)
    while True:
        task = rng.choice(list(TASKS))
        question, steps, answer = TASKS[task](rng)
        lines = []
        for step in steps:
            if lines and rng.random() < 0.3:
                lines.append(rng.choice(REMARKS))
            lines.append(step)
        problem = Problem(task, question, "\n".join(lines), answer)
        if problem.is_held_out == held_out:
            yield problem
