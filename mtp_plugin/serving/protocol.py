"""Bodies of requests: their fields, and the engine's options that they describe."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from mtp_plugin.errors import RequestError, format_value
from mtp_plugin.requests.options import (
    IGNORED_OPTIONS,
    MAX_LOGPROBS,
    SamplingParams,
    ignored_problem,
)
from mtp_plugin.requests.options.option import integral
from mtp_plugin.serving.errors import APIError, Problem, problem_of
from mtp_plugin.speculative.rows.request_options import PREFIX, RequestOptions

REFUSED = {
    **dict.fromkeys(
        ["structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"],
        "guided decoding is not supported",
    ),
    **dict.fromkeys(("lora_name", "lora_request"), "LoRA adapters are not supported"),
    **dict.fromkeys(("functions", "function_call"), "expected tools instead"),
    "chat_template": "a template in a request is not accepted",
    "logits_processors": "logits processors are not supported",
}
"""Fields of other servers that are refused with a reason."""
PLUGIN_OBJECTS = ("vllm_xargs", "custom_params")
"""Fields with the plugin's options of a request in vLLM and SGLang."""
PLUGIN_KEYS = {f"{PREFIX}{option.name}": option.name for option in fields(RequestOptions)}
"""Their keys, and the fields of these names here."""
TEMPLATE_VARIABLES_REFUSED = ("chat_template", "tokenize")


MAX_FIELDS = 256
"""Maximum number of fields of an object."""
MAX_ITEMS = 4096
"""Maximum number of messages, tools, or items of an option."""
MAX_IDS = 2**20
"""Maximum number of token ids of a list."""
UNSET_NUMBER = -1
"""A seed or a maximum number of tokens of this value counts as unset, as in other servers."""

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True, max_length=MAX_ITEMS)]
Object = Annotated[dict[str, Any], Field(max_length=MAX_FIELDS)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"at most {MAX_FIELDS} fields are served, got {len(value)}")
        return value


class StreamOptions(_Model):
    """What a stream contains besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class EngineFields(_Model):
    """Fields with the names of `SamplingParams`, which checks those of type Any."""

    max_tokens: Any = None
    min_tokens: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    include_stop_str_in_output: Any = None
    ignore_eos: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    add_special_tokens: Any = None
    detokenize: Any = None
    temperature: Any = 1.0
    top_p: Any = None
    top_p_min: Any = None
    top_k: Any = None
    min_p: Any = None
    seed: Any = None
    repetition_penalty: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    prompt_ignore_length: Any = None
    logit_bias: dict[str, Any] | None = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    prompt_logprobs: Any = None
    thinking_token_budget: Any = None
    thinking_budget: Any = None
    n: Any = None
    best_of: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    max_draft_len: Any = None
    verification: Any = None
    draft_sampling: Any = None
    relaxed_acceptance: Any = None
    relaxed_topk: Any = None
    relaxed_delta: Any = None

    @field_validator("max_tokens", "seed")
    @classmethod
    def _is_integral(cls, value: Any) -> Any:
        return integral(value)

    @field_validator("stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids")
    @classmethod
    def _has_few_items(cls, value: Any, info: ValidationInfo) -> Any:
        most = MAX_IDS // 4 if info.field_name == "allowed_token_ids" else MAX_ITEMS
        size = len(value) if isinstance(value, (list, dict)) else 0
        if isinstance(value, list):
            size += sum(len(each) for each in value[:MAX_ITEMS] if isinstance(each, list))
        if size > most:
            raise ValueError(f"at most {most} items are served, got {size}")
        return value

    @field_validator("use_beam_search")
    @classmethod
    def _is_off(cls, value: Any) -> Any:
        if value:
            raise ValueError(
                "beam search is not supported; leave it out; n samples several sequences"
            )
        return value

    @field_validator("detokenize")
    @classmethod
    def _is_on(cls, value: Any) -> Any:
        if value is False:
            raise ValueError("a response has its text; return_token_ids adds the ids")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _has_ids(cls, value: dict[str, Any] | None) -> Any:
        if value is None:
            return None
        wrong = [key for key in value if not (key.isascii() and key.isdecimal() and len(key) < 12)]
        if wrong:
            raise ValueError(f"expected token ids as keys, got {format_value(wrong[0])}")
        return {int(key): bias for key, bias in value.items()}


class GenerationBody(EngineFields):
    """The fields of both endpoints."""

    default_max_tokens: ClassVar[int | None] = None

    model: str | None = None
    max_completion_tokens: Any = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    speculate: bool = True
    return_token_ids: bool = False
    return_draft_segments: bool = False
    response_format: Object | None = None

    @field_validator("max_completion_tokens")
    @classmethod
    def _is_integral_too(cls, value: Any) -> Any:
        return integral(value)

    @field_validator("response_format")
    @classmethod
    def _is_text(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value != {"type": "text"}:
            raise ValueError("only the type text is supported")
        return value

    @property
    def is_echo_only(self) -> bool:
        """Whether the response has no output, only the prompt."""
        return False

    def engine_options(self) -> dict[str, Any]:
        """Return the given options of `SamplingParams`."""
        options = {name: getattr(self, name) for name in EngineFields.model_fields}
        options = {name: value for name, value in options.items() if value is not None}
        if _is_unset_number(self.seed):
            del options["seed"]
        count = options.pop("max_tokens", self.default_max_tokens)
        if self.max_completion_tokens is not None:
            count = self.max_completion_tokens
        return {**options, **_max_tokens_option(count), "speculate": self.speculate}

    def problems(self) -> list[Problem]:
        """Return problems between fields."""
        found: list[Problem] = []
        if self.stream_options is not None and not self.stream:
            found.append(("stream_options", "stream_options: needs stream=true"))
        if self.stream and self.prompt_logprobs is not None:
            found.append(("prompt_logprobs", "prompt_logprobs: needs stream=false"))
        given = (self.max_tokens, self.max_completion_tokens)
        if None not in given and given[0] != given[1]:
            found.append(("max_tokens", "max_tokens: differs from max_completion_tokens"))
        return found


def _is_unset_number(value: Any) -> bool:
    return type(value) is int and value == UNSET_NUMBER


def _max_tokens_option(count: Any) -> dict[str, Any]:
    is_unset = count is None or _is_unset_number(count)
    return {"max_new_tokens": None} if is_unset else {"max_tokens": count}


class CompletionBody(GenerationBody):
    """``/v1/completions``."""

    default_max_tokens: ClassVar[int | None] = 16

    prompt: Any
    echo: bool = False
    logprobs: Any = None

    @field_validator("prompt")
    @classmethod
    def _is_prompt(cls, value: Any) -> Any:
        # own code: a union of lists checks every alternative to its end
        value = _integral_ids(value)
        if isinstance(value, list) and set(map(type, value)) == {list}:
            value = list(map(_integral_ids, value))
        kinds = set(map(type, value)) if isinstance(value, list) else {type(value)}
        is_text = isinstance(value, str) or kinds == {str}
        is_ids = isinstance(value, list) and kinds <= {int}
        if is_text or is_ids:
            return value
        if kinds == {list} and all(set(map(type, each)) <= {int} for each in value):
            return value
        raise ValueError(
            f"expected a text, a list of token ids, or a list of these, got {format_value(value)}"
        )

    @property
    def is_echo_only(self) -> bool:
        """Whether the response has no output, only the prompt."""
        return self.echo and type(self.max_tokens) is int and self.max_tokens == 0

    def prompts(self) -> list[Any]:
        """Return the prompts."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return list(self.prompt)

    def engine_options(self) -> dict[str, Any]:
        """Return the given options of `SamplingParams`."""
        options = super().engine_options()
        if self.is_echo_only:
            options["max_tokens"] = 1  # the engine generates at least one, which is left out
        if self.logprobs is not None:
            options["logprobs"] = self.logprobs
            if self.echo:
                options.setdefault("prompt_logprobs", self.logprobs)
        return options


def _integral_ids(value: Any) -> Any:
    """Return a list of numbers as integers if all of them are; everything else unchanged."""
    if isinstance(value, list) and set(map(type, value)) in ({float}, {int, float}):
        ids = list(map(integral, value))
        return ids if set(map(type, ids)) == {int} else value
    return value


class ContentPart(_Model):
    """A part of a message's content."""

    type: str
    text: str = ""
    cache_control: Any = None  # a hint for caches of prompts

    @field_validator("type")
    @classmethod
    def _is_text(cls, value: str) -> str:
        if value != "text":
            raise ValueError(f"only text is supported, got {format_value(value)}")
        return value


class ChatMessage(_Model):
    """A message; the chat template gets all its fields."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | Items[ContentPart] | None = None
    tool_calls: Items[Object] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message with its content as text and arguments of tool calls as objects."""
        message = self.model_dump(exclude_unset=True)
        if isinstance(self.content, list):
            message["content"] = "".join(part.text for part in self.content)
        for call in message.get("tool_calls") or ():
            function = call.get("function")
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                try:
                    function["arguments"] = json.loads(function["arguments"])
                except (ValueError, RecursionError):
                    continue
        return message


class ConversationBody(_Model):
    """The fields that the chat template reads."""

    messages: Annotated[Items[ChatMessage], Field(min_length=1)]
    tools: Items[Object] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Object | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_variables(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in value or ():
            if name in TEMPLATE_VARIABLES_REFUSED or not name.isidentifier():
                raise ValueError(f"{format_value(name)} is not accepted")
        return value

    def template_options(self) -> dict[str, Any]:
        """Return the arguments of `LLM.apply_chat_template`."""
        return {
            "messages": [message.for_template() for message in self.messages],
            "tools": self.tools,
            # clients set continue_final_message alone
            "add_generation_prompt": self.add_generation_prompt and not self.continue_final_message,
            "continue_final_message": self.continue_final_message,
            "chat_template_kwargs": self.chat_template_kwargs,
        }


class ChatBody(ConversationBody, GenerationBody):
    """``/v1/chat/completions``."""

    reasoning_effort: str | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), BeforeValidator(integral)] | None = (
        None
    )
    tool_choice: str | Object | None = None

    @field_validator("tool_choice")
    @classmethod
    def _is_not_forced(cls, value: Any) -> Any:
        if value not in (None, "none", "auto"):
            raise ValueError("expected none or auto, as calls are not parsed")
        return value

    def template_options(self) -> dict[str, Any]:
        """Return the arguments of `LLM.apply_chat_template`."""
        options = super().template_options()
        if self.reasoning_effort is not None:
            variables = {"reasoning_effort": self.reasoning_effort}
            options["chat_template_kwargs"] = {**variables, **(self.chat_template_kwargs or {})}
        return options

    def engine_options(self) -> dict[str, Any]:
        """Return the given options of `SamplingParams`."""
        options = super().engine_options()
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
        # the template writes the special tokens
        options.setdefault("add_special_tokens", False)
        return options

    def problems(self) -> list[Problem]:
        """Return problems between fields."""
        found = super().problems()
        if self.top_logprobs and not self.logprobs:
            found.append(("top_logprobs", "top_logprobs: needs logprobs=true"))
        return found


class TokenizeBody(_Model):
    """``/tokenize`` of a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(ConversationBody):
    """``/tokenize`` of a conversation."""

    model: str | None = None
    add_special_tokens: bool = False
    return_token_strs: bool = False


class DetokenizeBody(_Model):
    """``/detokenize``."""

    model: str | None = None
    tokens: Annotated[
        list[Annotated[int, Field(ge=0)]],
        Field(fail_fast=True, max_length=MAX_IDS),
        BeforeValidator(_integral_ids),
    ]


Body = TypeVar("Body", bound=BaseModel)


def parse_body(kind: type[Body], content: Mapping[str, Any]) -> tuple[Body | None, list[Problem]]:
    """Return the body with its valid fields, and the problems of the others.

    The body is None if a required field is missing or invalid. Fields that are null count as not
    given, and so do those of other servers whose value changes nothing.
    """
    given = {name: value for name, value in content.items() if value is not None}
    refused = list(_move_options(given)) if issubclass(kind, GenerationBody) else []
    names = (IGNORED_OPTIONS.keys() & given.keys()) - kind.model_fields.keys()
    ignored = {name: ignored_problem(name, given.pop(name)) for name in sorted(names)}
    refused += [(name, reason) for name, reason in ignored.items() if reason]
    try:
        return kind.model_validate(given), refused
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
    problems: dict[str, Problem] = {}
    for each in found:
        field = str(each["loc"][0]) if each["loc"] else ""
        # a union reports every alternative: keep the first, or the one with a reason of ours
        if field in problems and each["type"] != "value_error":
            continue
        reason = each["msg"].removeprefix("Value error, ")
        if each["type"] == "extra_forbidden" and len(each["loc"]) == 1:
            reason = REFUSED.get(field, "unknown field")
        # pydantic adds the alternative of a union, such as list[ContentPart]
        where = ".".join(str(step) for step in each["loc"] if "[" not in str(step))[:200]
        problems[field] = (field[:200] or None, f"{where or 'the body'}: {reason}")
    valid = {name: value for name, value in given.items() if name not in problems}
    listed = [*problems.values(), *refused]
    try:
        return kind.model_validate(valid), listed
    except ValidationError:
        return None, listed


def _move_options(given: dict[str, Any]) -> Iterator[Problem]:
    """Move options under other names to their fields; yields why they cannot be moved."""
    moved = [("speculative", "speculate", given.pop("speculative", None))]
    for place in PLUGIN_OBJECTS:
        options = given.pop(place, {})
        if not isinstance(options, dict):
            yield place, f"{place}: expected an object, got {format_value(options)}"
            continue
        unknown = [key for key in options if key not in PLUGIN_KEYS]
        if unknown:
            known = ", ".join(PLUGIN_KEYS)
            yield place, f"{place}: expected keys of {known}, got {format_value(unknown[0])}"
        for key, field in PLUGIN_KEYS.items():
            value = options.get(key)
            # vLLM's arguments have no booleans
            if field == "speculate" and value in (0, 1):
                value = bool(value)
            moved.append((f"{place}.{key}", field, value))
    for name, field, value in moved:
        if value is not None and given.setdefault(field, value) != value:
            yield field, f"{name} is {field} under another name; leave one out"


def sampling_params(body: GenerationBody) -> tuple[SamplingParams, list[Problem]]:
    """Return the engine's options of a body without the invalid ones, and the problems of these."""
    options = body.engine_options()
    problems = body.problems()
    try:
        return SamplingParams(**options), problems
    except RequestError as error:
        found = problem_of(error, None)
    problems.append(found)
    # the other options are checked further, so that one error names all
    valid = {
        name: value for name, value in options.items() if not re.search(rf"\b{name}\b", found[1])
    }
    try:
        return SamplingParams(**valid), problems
    except RequestError:
        return SamplingParams(max_new_tokens=1), problems


def check_sizes(
    prompts: Sequence[Any],
    field: str,
    problems: Sequence[Problem],
    *,
    max_prompts: int,
    max_chars: int,
) -> None:
    """Refuse too many or too long prompts before anything reads them.

    Raises:
        APIError: see above; it names the known ``problems`` too.
    """
    size = sum(map(len, prompts))
    message = None
    if not prompts:
        message = "expected at least one"
    elif len(prompts) > max_prompts:
        message = f"at most {max_prompts} are served, got {len(prompts)}"
    elif size > max_chars:
        message = f"at most {max_chars} characters or ids are served, got {size}"
    if message is not None:
        raise APIError(400, *problems, (field, f"{field}: {message}"))
