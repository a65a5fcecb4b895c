"""What is read of an engine: why it failed, and its counters."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mtp_plugin.tools.tune.engine import find_reason, run_requests

LOG = """\
(EngineCore pid=2) ERROR 11-26 04:22:50 [core.py:1100] EngineCore failed to start.
(EngineCore pid=2) ERROR 11-26 04:22:50 [core.py:1100] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-26 04:22:50 [core.py:1100] mtp_plugin.errors.ConfigError: too many ids
RuntimeError: Engine core initialization failed. See root cause above.
"""


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            "RuntimeError: Engine core initialization failed. See root cause above.",
            "mtp_plugin.errors.ConfigError: too many ids",
        ),
        ("the process ended", "mtp_plugin.errors.ConfigError: too many ids"),
        ("ValueError: no such model", "ValueError: no such model"),
    ],
)
def test_reason_is_the_message_or_the_last_error_of_the_log(message: str, reason: str) -> None:
    assert find_reason(message, LOG) == reason
    assert find_reason(message, "") == message


class StubEngine:
    """Returns the tokens of its steps, by number of the request."""

    def __init__(self, steps: list[dict[int, list[int]]]) -> None:
        self.steps = steps
        self.params: list[Any] = []

    def add_request(self, identifier: str, prompt: Any, params: Any) -> None:
        assert (identifier, prompt) == (str(len(self.params)), {"prompt_token_ids": [5]})
        self.params.append(params)

    def has_unfinished_requests(self) -> bool:
        return bool(self.steps)

    def step(self) -> list[Any]:
        tokens = self.steps.pop(0)
        return [
            SimpleNamespace(
                request_id=f"{number}-suffix",
                outputs=[SimpleNamespace(token_ids=ids)],
                finished=not self.steps,
            )
            for number, ids in tokens.items()
        ]

    def get_metrics(self) -> list[Any]:
        values = {"num_drafts": 4, "num_accepted_tokens_per_pos": [3, 1]}
        done = {name: value for name, value in values.items() if not self.steps}
        return [
            SimpleNamespace(name=f"vllm:spec_decode_{name}", value=value, values=value)
            for name, value in done.items()
        ]


def test_steps_in_which_all_requests_generate_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = SimpleNamespace(DELTA="delta")
    stubs = {
        "vllm": SimpleNamespace(SamplingParams=lambda **options: options),
        "vllm.sampling_params": SimpleNamespace(RequestOutputKind=kinds),
    }
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, name, stub)
    steps = [
        {0: [1]},
        {0: [2], 1: [1]},
        {},
        {0: [3, 4], 1: [2]},
        {0: [5], 1: [3]},
        {0: [6], 1: [4]},
    ]
    engine = StubEngine(steps)
    result = run_requests(engine, [([5], {"seed": 0}), ([5], {"seed": 1})])
    assert result["tokens"] == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4]]
    # neither the steps with the first tokens nor the one that ends requests
    assert len(result["step_ms"]) == 2
    assert result["acceptance"] == [0.75, 0.25]
    assert engine.params[1] == {"seed": 1, "detokenize": False, "output_kind": "delta"}
