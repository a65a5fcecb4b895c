"""Renders chat messages with the template of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtp_plugin.errors import RequestError, describe_error, format_value

Message = Mapping[str, Any]
"""A mapping with ``role`` and ``content``."""


def conversations_of(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Any]:
    """Return one conversation or several as a list.

    Raises:
        RequestError: not a list of messages, or of lists of messages; a template would render
            anything else to an empty text.
    """
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    is_one = not is_list or (messages and isinstance(messages[0], Mapping))
    conversations: list[Any] = [messages] if is_one else list(messages)
    for conversation in conversations or [conversations]:
        is_list = isinstance(conversation, Sequence) and not isinstance(conversation, str)
        wrong = [each for each in conversation if not _is_message(each)] if is_list else []
        if wrong or not is_list or not conversation:
            raise RequestError(
                f"messages: expected mappings with role and content, got "
                f"{format_value(wrong[0] if wrong else conversation)}"
            )
    return conversations


def render_chat(
    tokenizer: Any, messages: Sequence[Message], variables: Any = None, **options: Any
) -> str:
    """Return the text of a conversation.

    Args:
        variables: further variables of the template; None: none.
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
        given = {} if variables is None else variables
        text = apply(list(messages), tokenize=False, **options, **given)
    except Exception as error:
        raise RequestError(
            f"chat: the chat template cannot render the messages: {describe_error(error)}"
        ) from error
    if not isinstance(text, str):
        raise RequestError(f"chat: the chat template gave {format_value(text)}, expected text")
    return text


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str)
