"""Outputs, prompts, several sequences per prompt, chat and metrics of the Python API."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from mtp_plugin import SamplingParams
from mtp_plugin.errors import RequestError
from mtp_plugin.hosts.embedded import LLM, CompletionOutput
from mtp_plugin.hosts.embedded.metrics import Counter, Vector
from tests.hosts.embedded.conftest import TRAINED
from tests.hosts.embedded.test_llm_api import Pieces, greedy

SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=3, ignore_eos=True)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def trained() -> LLM:
    return LLM(TRAINED, max_batch_size=4, device="cpu", speculative_config={"decoding_type": "MTP"})


def test_fields_of_the_first_sequence_are_fields_of_the_output(trained: LLM) -> None:
    output = trained.generate("class HTTPServer:\n", SamplingParams(max_tokens=9, logprobs=1))
    (completion,) = output.outputs
    assert isinstance(completion, CompletionOutput)
    assert (completion.index, output.finished, output.prompt) == (0, True, "class HTTPServer:\n")
    for name in ("text", "token_ids", "finish_reason", "stop_reason", "logprobs", "acceptance"):
        assert getattr(output, name) is getattr(completion, name) or output.text
    chosen = [m[t] for t, m in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(one.logprob for one in chosen))
    assert "".join(one.decoded_token for one in chosen) == completion.text
    times = output.metrics
    assert times.arrival_time <= times.first_token_time <= times.finished_time


def test_output_can_be_pickled(trained: LLM) -> None:
    params = SamplingParams(max_tokens=4, logprobs=1, prompt_logprobs=1)
    output = trained.generate("class HTTPServer:\n", params)
    kept = pickle.loads(pickle.dumps(output))
    assert kept == output
    assert kept.logprobs == output.logprobs != []
    assert kept.prompt_logprobs == output.prompt_logprobs


def test_output_and_last_event_have_the_stop_reason_and_the_error(harness, target) -> None:
    llm = harness.llm(tokenizer=Pieces())
    tokens = target.greedy([1, 2, 3], 12)
    at = next(i for i in range(4, 12) if tokens[i] not in tokens[:i])
    stop = Pieces().decode([tokens[at]], skip_special_tokens=True)
    for params, finish, reason in (
        (greedy(stop_token_ids=[tokens[at]]), "stop", tokens[at]),
        (greedy(stop=stop), "stop", stop),
        (greedy(3), "length", None),
    ):
        events = [event for step in llm.stream([[1, 2, 3]], params) for event in step]
        (output,) = llm.generate([[1, 2, 3]], params)
        assert (output.finish_reason, output.stop_reason) == (finish, reason)
        found = [(event.stop_reason, event.error) for event in events]
        assert found[-1] == (output.stop_reason, None)
        assert set(found[:-1]) <= {(None, None)}
    stream = llm.stream([[1, 2, 3]], greedy(60))
    ((first,),) = [next(stream)]
    llm.find_request(first.request_id).fail("a defect")
    last = [event for step in stream for event in step][-1]
    assert (last.finish_reason, last.error, last.stop_reason) == ("error", "a defect", None)


def test_stop_reason_of_an_eos_id_is_none(harness, target) -> None:
    llm = harness.llm()
    tokens = target.greedy([1, 2, 3], 12)
    at = next(i for i in range(4, 12) if tokens[i] not in tokens[:i])
    llm._admission._facts = type("Facts", (), {**vars(llm.model.facts)})
    llm._admission._facts.eos_token_ids = (tokens[at],)
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=12))
    assert (output.token_ids[-1], output.finish_reason) == (tokens[at], "stop")
    assert output.stop_reason is None


# --- prompts ---


@pytest.mark.parametrize(
    ("prompts", "ids", "texts"),
    [
        ([{"prompt": "&'"}], [[6, 7]], ["&'"]),
        ([{"prompt_token_ids": [6, 7]}], [[6, 7]], [None]),
        ([{"prompt": "&"}, [7], "&'"], [[6], [7], [6, 7]], ["&", None, "&'"]),
    ],
)
def test_prompts_as_mappings(harness, prompts: Any, ids: Any, texts: Any) -> None:
    outputs = harness.llm(tokenizer=Pieces()).generate(prompts, greedy(2))
    assert [o.prompt_token_ids for o in outputs] == ids
    assert [o.prompt for o in outputs] == texts


# --- several sequences ---


def test_n_sequences_share_a_prompt_and_the_first_is_that_of_one(harness) -> None:
    llm = harness.llm(tokenizer=Pieces())
    one, *_ = llm.generate([[1, 2]], SamplingParams(**{**OPTIONS_OF_ONE}))
    first, second = llm.generate([[1, 2], [3]], SAMPLED)
    assert [c.index for c in first.outputs] == [0, 1, 2]
    assert first.token_ids == one.token_ids
    assert len({tuple(c.token_ids) for c in first.outputs}) == 3
    assert (first.metrics, second.prompt_token_ids) == (None, [3])
    again = asyncio.run(llm.generate_async([1, 2], SAMPLED))
    handle = llm.submit([1, 2], SAMPLED)
    for other in (again, handle.result()):
        assert [c.token_ids for c in other.outputs] == [c.token_ids for c in first.outputs]
    found: dict[tuple[int, int], list[int]] = {}
    for events in llm.stream([[3], [1, 2]], SAMPLED):
        for event in events:
            key = event.prompt_index, event.sample_index
            found.setdefault(key, []).extend(event.token_ids)
    assert [found[1, i] for i in range(3)] == [c.token_ids for c in first.outputs]


OPTIONS_OF_ONE = {"max_tokens": 12, "temperature": 1.0, "seed": 3, "ignore_eos": True}


def test_n_without_seed_gives_different_sequences(harness) -> None:
    llm = harness.llm()
    (output,) = llm.generate([[1, 2]], SamplingParams(max_tokens=12, temperature=1.0, n=4))
    assert len({tuple(c.token_ids) for c in output.outputs}) == 4


# --- text options ---


class Marked(Pieces):
    """Token 6 is special, and a BOS token is added to texts."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + super().encode(text)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        shown = [t for t in token_ids if t != 6 or not skip_special_tokens]
        return super().decode(shown, skip_special_tokens=skip_special_tokens)


def test_text_options(harness) -> None:
    llm = harness.llm(tokenizer=Marked())
    allowed = greedy(4, allowed_token_ids=(6,))
    hidden = llm.generate("a", allowed)
    shown = llm.generate("a", greedy(4, allowed_token_ids=(6,), skip_special_tokens=False))
    assert (hidden.text, shown.text) == ("", "&&&&")
    without = llm.generate("a", greedy(4, add_special_tokens=False))
    assert hidden.prompt_token_ids == [1, *without.prompt_token_ids]
    no_text = llm.generate("a", greedy(4, detokenize=False))
    assert (no_text.text, len(no_text.token_ids)) == ("", 4)
    with pytest.raises(RequestError, match="stop needs detokenize=True"):
        llm.generate("a", greedy(4, detokenize=False, stop="a"))


# --- chat ---


def test_chat_renders_the_template(trained: LLM) -> None:
    conversation = [{"role": "user", "content": "def f"}, {"role": "assistant", "content": "("}]
    params = SamplingParams(max_tokens=4)
    (output,) = trained.chat(conversation, params, chat_template=TEMPLATE)
    assert output.prompt == "<user>def f<assistant>("
    outputs = trained.chat([conversation, conversation[:1]], params, chat_template=TEMPLATE)
    assert [o.prompt for o in outputs] == [output.prompt, "<user>def f"]
    assert trained.get_tokenizer() is trained.tokenizer


@pytest.mark.parametrize("messages", [[], "hello", None, 3, [3], [{"content": "a"}]])
def test_chat_of_something_else_is_refused(trained: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match=r"^messages: expected "):
        trained.chat(messages, chat_template=TEMPLATE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": 5}, "not iterable"),
        ({"tools": [{"type": "function"}, "search"]}, "JSON schema"),
        ({"chat_template_kwargs": 5}, "must be a mapping, not int"),
        ({"chat_template_kwargs": {1: 2}}, "keywords must be strings"),
        ({"chat_template_kwargs": {"tools": []}}, "multiple values for keyword argument 'tools'"),
        ({"chat_template_kwargs": {"messages": []}}, "multiple values .* 'messages'"),
    ],
)
def test_chat_options_of_another_type_are_refused(
    trained: LLM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=f"^chat: .* cannot render the messages: .*{message}"):
        trained.chat([{"role": "user", "content": "a"}], chat_template=TEMPLATE, **options)


def test_chat_without_a_template_is_refused(
    trained: LLM, harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "user", "content": "a"}]
    monkeypatch.setattr(trained.tokenizer, "chat_template", None)
    with pytest.raises(RequestError, match="has a tokenizer without a chat template"):
        trained.chat(messages)
    with pytest.raises(RequestError, match="has no tokenizer"):
        harness.llm().chat(messages)
    with pytest.raises(RequestError, match=r"cannot render the messages: .*no images"):
        trained.chat(messages, chat_template="{{ raise_exception('no images') }}")


# --- metrics ---


def test_metrics_count_tokens_and_accepted_drafts(harness) -> None:
    llm = harness.llm()
    outputs = llm.generate([[1, 2], [3]], greedy(12))
    metrics = {
        (metric.name, *metric.labels.values()): metric for metric in llm.get_metrics("vllm:")
    }
    assert metrics["vllm:prompt_tokens",] == Counter("vllm:prompt_tokens", 3)
    assert metrics["vllm:generation_tokens",].value == 24
    assert metrics["vllm:request_success", "length"].value == 2
    steps = sum(o.acceptance.steps for o in outputs)
    assert metrics["vllm:spec_decode_num_drafts",].value == steps
    per_position = metrics["vllm:spec_decode_num_accepted_tokens_per_pos",]
    assert isinstance(per_position, Vector)
    accepted = metrics["vllm:spec_decode_num_accepted_tokens",].value
    assert sum(per_position.values) == accepted == 22 - steps
    per_length = metrics["vllm:spec_decode_num_steps_per_draft_len",]
    assert per_length.index == "draft_len"
    # all but the prompts' step
    assert per_length.values == [0, 0, 0, llm.executor.num_steps - 1]
