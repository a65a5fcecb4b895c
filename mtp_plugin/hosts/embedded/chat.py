"""Renders chat messages with the template of a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mtp_plugin.errors import RequestError, describe_error, format_value

Message = Mapping[str, Any]
"""A mapping with ``role`` and ``content``."""
RESERVED_VARIABLES = (
    "conversation",
    "messages",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "return_dict",
    "return_tensors",
)
"""Names that ``chat_template_kwargs`` may not have."""


def conversations_of(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Any]:
    """Return one conversation or several as a list.

    Raises:
        RequestError: not a list of messages, or of lists of messages.
    """
    is_list = isinstance(messages, Sequence) and not isinstance(messages, (str, bytes))
    if not is_list or not messages:
        raise RequestError(
            f"messages: expected a list of mappings with role and content, got "
            f"{format_value(messages)}"
        )
    conversations: list[Any] = [messages] if isinstance(messages[0], Mapping) else list(messages)
    for conversation in conversations:
        is_conversation = isinstance(conversation, Sequence) and not isinstance(conversation, str)
        wrong = [conversation]
        if is_conversation:
            wrong = [message for message in conversation if not _is_message(message)]
        if wrong or not conversation:
            raise RequestError(
                f"messages: expected mappings with role and content, got "
                f"{format_value(wrong[0] if wrong else conversation)}"
            )
    return conversations


def tools_of(tools: Any) -> list[Any] | None:
    """Return tool definitions as a list, None for none. transformers also takes functions.

    Raises:
        RequestError: neither None nor a list of mappings.
    """
    if tools is None:
        return None
    listed: list[Any] = []
    wrong = [tools]
    if isinstance(tools, Iterable) and not isinstance(tools, (str, bytes, Mapping)):
        listed = list(tools)
        wrong = [tool for tool in listed if not isinstance(tool, Mapping) and not callable(tool)]
    if wrong:
        raise RequestError(
            "tools: expected a list of mappings, as [{'type': 'function', 'function': {...}}], or "
            f"None, got {format_value(wrong[0])}"
        )
    return listed


def template_variables_of(variables: Any) -> dict[str, Any]:
    """Return further variables of a chat template.

    Raises:
        RequestError: neither None nor a mapping of names, or a name with a meaning of its own.
    """
    if variables is None:
        return {}
    is_mapping = isinstance(variables, Mapping)
    if not is_mapping or not all(isinstance(name, str) for name in variables):
        raise RequestError(
            f"chat_template_kwargs: expected a mapping of names to values or None, got "
            f"{format_value(variables)}"
        )
    for name in RESERVED_VARIABLES:
        if name in variables:
            raise RequestError(
                f"chat_template_kwargs: {name!r} is no variable of a template; it is an argument "
                f"of chat and apply_chat_template, or cannot be set"
            )
    return dict(variables)


def render_chat(tokenizer: Any, messages: Sequence[Message], /, **options: Any) -> str:
    """Return the text of a conversation.

    Args:
        options: of the tokenizer's ``apply_chat_template``.

    Raises:
        RequestError: the tokenizer has no chat template, or the template raises an error.
    """
    apply = getattr(tokenizer, "apply_chat_template", None)
    has_template = options.get("chat_template") or getattr(tokenizer, "chat_template", None)
    if apply is None or not has_template:
        missing = "no tokenizer" if tokenizer is None else "a tokenizer without a chat template"
        raise RequestError(
            f"chat: the checkpoint has {missing}; give chat_template, or write the prompt yourself "
            f"and call generate"
        )
    try:
        text = apply(list(messages), tokenize=False, **options)
    except Exception as error:
        raise RequestError(
            f"chat: the chat template cannot render the messages: {describe_error(error)}"
        ) from error
    if not isinstance(text, str):
        raise RequestError(f"chat: the chat template gave {format_value(text)}, expected text")
    return text


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str)
