"""The example loop is lossless and takes fewer steps than tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from integration.examples import own_loop
from integration.examples.own_loop import OwnLoop, main
from mtp_plugin import FinishReason, MTPSpecMetadata, SamplingParams
from mtp_plugin.errors import RequestError, TensorContractError
from mtp_plugin.hosts.embedded.models import LoadedModel, load_model
from mtp_plugin.infer import decode
from mtp_plugin.plugin import PlainAttentionMetadata, PlainBatch, PlainRequest
from mtp_plugin.speculative.drafting import MTPEagleWorker, MTPWorker
from mtp_plugin.speculative.state import MTPHiddenStatesManager

TINY_MODEL = Path(__file__).parent.parent / "tiny_model"
CHECKPOINT = TINY_MODEL / "checkpoint"
GREEDY = SamplingParams(max_tokens=16)
SAMPLED = SamplingParams(max_tokens=8, temperature=0.7, top_p=0.9, frequency_penalty=0.2)
LEAST_TOKENS_A_STEP = {1: 1.5, 2: 1.9, 3: 2.2}

torch.set_num_threads(1)  # small layers: a second thread slows them down


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(CHECKPOINT)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Those of the model, and one of a single token: windows of pairs then begin before it."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    texts = json.loads((TINY_MODEL / "prompts.json").read_text())[:3]
    return [tokenizer.encode(text["prompt"]) for text in texts] + [[7]]


def plain_texts(
    model: LoadedModel, prompts: list[list[int]], params: SamplingParams
) -> list[list[int]]:
    """Of the target alone, over transformers' own attention."""
    ends = model.facts.eos_token_ids
    return [
        list(decode(model.target, ids, params, number=number, end_ids=ends).token_ids)
        for number, ids in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def greedy_texts(model: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    return plain_texts(model, prompts, GREEDY)


@pytest.mark.parametrize("vanilla", [False, True], ids=["eagle", "vanilla"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_text_is_the_targets_and_comes_faster(
    k: int,
    vanilla: bool,
    model: LoadedModel,
    prompts: list[list[int]],
    greedy_texts: list[list[int]],
) -> None:
    loop = OwnLoop(model, k, vanilla=vanilla, max_batch_size=3)
    assert type(loop.components.worker) is (MTPWorker if vanilla else MTPEagleWorker)
    assert isinstance(loop.components.manager, MTPHiddenStatesManager) is vanilla
    requests = loop.generate(prompts, GREEDY)
    assert [request.output_token_ids for request in requests] == greedy_texts
    assert {request.finish_reason for request in requests} == {FinishReason.LENGTH}
    # the first token is the prompt's
    tokens = sum(len(request.output_token_ids) - 1 for request in requests)
    steps = sum(request.py_decoding_iter - 1 for request in requests)
    assert tokens / steps > LEAST_TOKENS_A_STEP[k]
    assert loop.caches == {}
    assert loop.components.manager.slot_manager.slot_mapping == {}


@pytest.mark.parametrize("vanilla", [False, True], ids=["eagle", "vanilla"])
def test_sampled_outputs_are_lossless(
    vanilla: bool, model: LoadedModel, prompts: list[list[int]]
) -> None:
    requests = OwnLoop(model, 2, vanilla=vanilla, max_batch_size=8).generate(prompts, SAMPLED)
    texts = plain_texts(model, prompts, SAMPLED)
    assert [request.output_token_ids for request in requests] == texts


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"verification": "rejection"}, "verification='rejection' is not enabled; add it to "),
        ({"draft_sampling": "plain"}, "draft_sampling='plain' cannot be verified by 'coupled'"),
        ({"logprobs": 1, "logprobs_mode": "processed"}, "logprobs_mode='processed'"),
    ],
)
def test_what_the_config_does_not_list_is_refused(
    model: LoadedModel, prompts: list[list[int]], options: dict[str, Any], why: str
) -> None:
    loop = OwnLoop(model, 2, vanilla=False, max_batch_size=2)
    params = SamplingParams(max_tokens=3, temperature=1.0, **options)
    for request in loop.generate(prompts[:2], params):
        assert request.finish_reason is FinishReason.ERROR
        assert request.output_token_ids == []
        assert request.py_error.startswith(f"not supported with MTP: {why}")


@pytest.mark.parametrize("token", [-1, 10**6, 2**40, 1.5, "a"])
def test_prompt_token_outside_the_vocabulary_is_refused(model: LoadedModel, token: Any) -> None:
    loop = OwnLoop(model, 2, vanilla=False, max_batch_size=2)
    message = rf"^request 1: prompt token 2: expected an id from 0 to \d+, got {token!r}$"
    with pytest.raises(RequestError, match=message):
        loop.generate([[7], [7, 8, token]], GREEDY)


DENSE = r"torch.sparse_coo torch.\w+ \[.*\] on cpu; call to_dense\(\)$"


@pytest.mark.parametrize("vanilla", [False, True], ids=["eagle", "vanilla"])
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        *(
            (name, torch.Tensor.to_sparse, rf"^{name}: expected .* tensor.*, got {DENSE}")
            for name in ("input_ids", "position_ids", "hidden_states", "logits", "draft_tokens")
        ),
        ("hidden_states", torch.Tensor.double, r"^hidden_states: .*float32 tensor.* torch.float64"),
        (
            "next_prompt_tokens",
            lambda _: torch.zeros(7, dtype=torch.int32),
            r"^next_prompt_tokens: expected integer tensor \[2\], got torch.int32 \[7\]",
        ),
    ],
)
def test_tensor_of_another_kind_is_named(
    model: LoadedModel, vanilla: bool, name: str, change: Any, message: str
) -> None:
    loop = OwnLoop(model, 2, vanilla=vanilla, max_batch_size=2)
    worker = loop.components.worker

    def change_inputs(_: Any, __: Any, given: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        if name in given:
            return (), {**given, name: change(given[name])}
        spec = given["spec_metadata"]
        setattr(spec, name, change(getattr(spec, name)))
        return (), given

    worker.register_forward_pre_hook(change_inputs, with_kwargs=True)
    with pytest.raises(TensorContractError, match=message):
        loop.generate([[7, 8, 9], [7, 8, 9, 10]], GREEDY)


def test_it_runs_as_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    main(str(CHECKPOINT))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    texts = [line.split(" steps: ")[1] for line in lines]
    assert texts[:2] == texts[2:]
    assert all(int(line.split(" steps: ")[0]) < 16 for line in lines)


PAGE = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
STEP = PAGE.split("```python\n")[1].split("```")[0]


def set_in_every_step() -> dict[str, list[str]]:
    """Fields of the page's table by owner."""
    table = PAGE.split("What a host sets in every step:\n\n")[1].split("\n\n")[0]
    owner, found = "", dict[str, list[str]]()
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        owner = cells[0] or owner
        found.setdefault(owner, []).extend(re.findall(r"`(\w+)`", cells[1]))
    return found


def test_step_of_the_page_is_that_of_the_example() -> None:
    assert indent(STEP, "    ") in Path(own_loop.__file__).read_text(encoding="utf-8")


def test_what_a_host_sets_is_what_the_loop_sets() -> None:
    named = set_in_every_step()
    assert named["the metadata"] == re.findall(r"spec\.(\w+) =", STEP)
    call = STEP.split("self.components.worker(")[1].split("\n    )\n")[0]
    arguments = re.findall(r"^ +(\w+)=", call, re.MULTILINE)
    assert [*named["the worker"], "attn_metadata", "spec_metadata"] == arguments
    request = PlainRequest(0, [3], SamplingParams(), max_seq_len=8)
    holders = {
        "each new request": request,
        "each request": request,
        "the metadata": MTPSpecMetadata(max_num_requests=1, max_draft_len=1),
        "attention": PlainAttentionMetadata(PlainBatch([request], []), "cpu"),
    }
    assert {
        (owner, name)
        for owner, holder in holders.items()
        for name in named[owner]
        if not hasattr(holder, name)
    } == set()
