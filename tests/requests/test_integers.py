"""Arguments that are no integers are refused by name, whatever their type is."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mtp_plugin.config import MTPDecodingConfig, SpeculativeDecodingMode, load_plugin_options
from mtp_plugin.errors import ConfigError, MetadataError, MTPPluginError, RequestError
from mtp_plugin.requests.slots import SlotManager
from mtp_plugin.requests.stopping import StopRule
from mtp_plugin.requests.thinking import ThinkingEnd, read_thinking_token

CONFIG = MTPDecodingConfig(max_draft_len=2)
CASES: dict[str, tuple[Callable[[Any], object], type[MTPPluginError]]] = {
    "num_slots": (SlotManager, MetadataError),
    "request_id": (SlotManager(2).add_slot, MetadataError),
    "max_length": (lambda value: StopRule(max_length=value), RequestError),
    "prompt_len": (lambda value: StopRule(max_length=9, prompt_len=value), RequestError),
    "min_tokens": (lambda value: StopRule(max_length=9, min_tokens=value), RequestError),
    "end_ids": (lambda value: StopRule(max_length=9, end_ids=(value,)), RequestError),
    "ignored_ids": (lambda value: StopRule(max_length=9, ignored_ids=(value,)), RequestError),
    "thinking_end": (lambda value: ThinkingEnd(1, (value,)), ConfigError),
    "num_mtp_layers": (CONFIG.resolve, ConfigError),
    "batch_size": (CONFIG.draft_len_for, ConfigError),
    "draft_len": (CONFIG.mtp.acceptance_shares, ConfigError),
    "begin_thinking_phase_token": (
        lambda value: read_thinking_token(
            SimpleNamespace(begin_thinking_phase_token=value), "begin"
        ),
        ConfigError,
    ),
}


@pytest.mark.parametrize("value", ["3", 1.0, [], True, object], ids=repr)
@pytest.mark.parametrize("name", CASES)
def test_other_types_are_refused_by_name(name: str, value: Any) -> None:
    call, error = CASES[name]
    with pytest.raises(error, match=f"^{name}: expected an integer"):
        call(value)


@pytest.mark.parametrize("name", [5, [], "eagle"], ids=repr)
def test_decoding_mode_of_another_type_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"^speculative decoding mode: expected one of NONE"):
        SpeculativeDecodingMode.from_string(name)


def test_plugin_options_of_no_path_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^config: expected a file.s path, got 5"):
        load_plugin_options(5, "options")  # type: ignore[arg-type]
