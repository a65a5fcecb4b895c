"""The tiny trained model, its prompts, and what plain decoding and the embedded executor make of
them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from mtp_plugin.config import load_config
from mtp_plugin.hosts.embedded import LLM, SamplingParams
from mtp_plugin.hosts.embedded.attention import SDPA_BACKEND
from mtp_plugin.hosts.embedded.models import LoadedModel, load_model
from mtp_plugin.hosts.embedded.models.tokenizer_files import read_tokenizer_of
from mtp_plugin.infer import decode
from mtp_plugin.infer.decoding import Decoded
from mtp_plugin.requests.tokenizer import encode
from tests.contract_host.host import Host, make_host
from tests.contract_host.installed import installed
from tests.contract_host.line_rules import LINES
from tests.contract_host.requests import LlmRequest

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "integration" / "tiny_model" / "checkpoint"
END_ID = 0
LENGTHS = [16, 1, 10, 14, 2, 12]


def ask(prompts: list[list[int]], lengths: list[int] = LENGTHS, **options: Any) -> list[LlmRequest]:
    """A request per length, ids from 1 on."""
    return [
        LlmRequest(number, prompts[number - 1], count, end_id=END_ID, **options)
        for number, count in enumerate(lengths, start=1)
    ]


def texts(
    decoded: Any, prompts: list[list[int]], lengths: list[int] = LENGTHS, **options: Any
) -> list[list[int]]:
    """What plain decoding makes of the prompts."""
    return [
        decoded(prompt, max_new_tokens=count, **options).token_ids
        for prompt, count in zip(prompts, lengths, strict=False)
    ]


def options_of(line: str, **options: Any) -> SimpleNamespace:
    """A sampling config in the line's form."""
    if not LINES[line].is_newest:
        options = {name: [value] for name, value in options.items()}
    return SimpleNamespace(beam_width=1, **options)


def free_strangers(host: Host) -> None:
    """Free unknown ids."""
    host.executor.managers.free_resources(LlmRequest(77_777, [1], 1))


@pytest.fixture(autouse=True)
def package(request: pytest.FixtureRequest) -> Iterator[None]:
    """The generated package of a test's line, with the plugin installed."""
    if not {"line", "tiny_model"} <= set(request.fixturenames):
        yield
        return
    with installed(LINES[request.getfixturevalue("line")]):
        yield


@pytest.fixture(scope="session")
def tiny_model() -> LoadedModel:
    return load_model(CHECKPOINT, num_mtp_layers=3, attn_implementation=SDPA_BACKEND)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Token ids, 20 to 40 of each."""
    tokenizer = read_tokenizer_of(Path(CHECKPOINT))
    items = json.loads((CHECKPOINT.parent / "prompts.json").read_text())
    return [encode(tokenizer, item["prompt"]) for item in items]


@pytest.fixture(scope="session")
def decoded() -> Callable[..., Decoded]:
    """A prompt's continuation by the target alone; every one is made once."""
    target = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    target.float()
    made: dict[Any, Decoded] = {}

    def plain(prompt: list[int], number: int = 0, **options: Any) -> Decoded:
        key = tuple(prompt), number, repr(options)
        if key not in made:
            params = SamplingParams(**options)
            made[key] = decode(target, prompt, params, number=number, end_ids=(END_ID,))
        return made[key]

    return plain


@pytest.fixture(scope="session")
def embedded_steps(tiny_model: LoadedModel) -> Callable[..., Counter[int]]:
    """Emitted tokens of every generation's step in the embedded executor, counted."""

    def run(prompts: list[list[int]], max_new_tokens: list[int], *, vanilla: bool) -> Counter[int]:
        config = load_config(ROOT / "configs" / f"tiny_{'vanilla' if vanilla else 'eagle'}.yaml")
        params = [SamplingParams(max_new_tokens=count) for count in max_new_tokens]
        with LLM(config, model=tiny_model) as llm:
            llm.generate(prompts, params)
            histogram = llm.executor.acceptance.histogram
        return Counter({n: count for n, count in enumerate(histogram) if count})

    return run


@pytest.fixture
def make(line: str, tiny_model: LoadedModel) -> Callable[..., Host]:
    """Build the host of a test's line."""
    return partial(make_host, line, tiny_model)


@pytest.fixture
def check(prompts: list[list[int]], decoded: Callable[..., Decoded]) -> Callable[..., None]:
    """Generate requests in a host: they have the text of plain decoding, and nothing is left."""

    def run(host: Host, lengths: list[int] = LENGTHS) -> None:
        assert host.generate(ask(prompts, lengths)) == texts(decoded, prompts, lengths)
        host.assert_drained()

    return run
