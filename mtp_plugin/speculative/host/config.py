"""Read a host engine's decoding config and the arguments that it builds components with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import Self

from mtp_plugin.config import MTPPluginOptions
from mtp_plugin.errors import ConfigError, expect, expect_int
from mtp_plugin.requests.options import OPTIONS
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.requests.thinking import (
    NO_TOKEN,
    ThinkingEnd,
    read_thinking_token,
    resolve_thinking_end,
)


@dataclass(frozen=True)
class DecodingOptions:
    """The options that components read from a decoding config, ours or a host engine's."""

    max_draft_len: int
    """K: maximum number of draft tokens per step."""
    mtp: MTPPluginOptions = field(default_factory=MTPPluginOptions)
    use_relaxed_acceptance_for_thinking: bool = False
    relaxed_topk: int = 1
    relaxed_delta: float = 0.0
    thinking_tokens: tuple[int, int] = (NO_TOKEN, NO_TOKEN)
    """(begin, end) ids."""
    thinking_end: ThinkingEnd | None = None
    """The end sequence that thinking budgets force; None: no request may have a budget."""

    @classmethod
    def read(
        cls,
        config: Any,
        *,
        least_draft_len: int = 1,
        thinking_tokens: tuple[int, int] | None = None,
        defer_thinking_end: bool = False,
    ) -> Self:
        """Read a config.

        K is ``max_draft_len`` if it is set, else ``num_nextn_predict_layers``: a host engine may
        keep the checkpoint's number of MTP layers under the older name, in addition to K.

        Args:
            thinking_tokens: (begin, end) ids from the host engine; None: those of the config.
            defer_thinking_end: leave ``thinking_end`` None for the caller to resolve.

        Raises:
            ConfigError: there is no K of at least ``least_draft_len``, or an option of
                ``config.mtp`` is invalid.
        """
        max_draft_len = _read_max_draft_len(config, least_draft_len)
        option = OPTIONS["relaxed_topk"]
        topk = option.values.read(getattr(config, "relaxed_topk", None))
        problem = option.problem("relaxed_topk", topk)
        expect(problem is None, ConfigError, problem or "")
        if isinstance(config, cls):
            if thinking_tokens is None:
                return config
            return replace(config, thinking_tokens=thinking_tokens)
        thinking_end = None if defer_thinking_end else resolve_thinking_end(config, None)
        tokens = thinking_tokens or (
            read_thinking_token(config, "begin"),
            read_thinking_token(config, "end"),
        )
        return cls(
            max_draft_len=max_draft_len,
            mtp=_read_plugin_options(config),
            use_relaxed_acceptance_for_thinking=bool(
                getattr(config, "use_relaxed_acceptance_for_thinking", False)
            ),
            relaxed_topk=1 if topk is None else int(topk),
            relaxed_delta=float(_given(config, "relaxed_delta", 0.0)),
            thinking_tokens=tokens,
            thinking_end=thinking_end,
        )


def _given(config: Any, name: str, default: float) -> float:
    value = getattr(config, name, None)
    return default if value is None else value


def _read_max_draft_len(config: Any, least: int) -> int:
    for name in ("max_draft_len", "num_nextn_predict_layers"):
        value = getattr(config, name, None)
        if value is not None:
            expect(
                isinstance(value, int) and value >= least,
                ConfigError,
                f"{name}: expected an integer >= {least}, got {value!r}",
            )
            return int(value)
    raise ConfigError("the decoding config gives no max_draft_len and no num_nextn_predict_layers")


def _read_plugin_options(config: Any) -> MTPPluginOptions:
    options = getattr(config, "mtp", None)
    if isinstance(options, MTPPluginOptions):
        return options
    names = MTPPluginOptions.model_fields
    given = {name: getattr(options, name) for name in names if hasattr(options, name)}
    return MTPPluginOptions.model_validate(given, context={"source": "mtp"})


@dataclass(frozen=True)
class SamplerSizes:
    """The fields of ``TorchSampler.Args`` that a sampler reads."""

    max_num_sequences: int  # S
    max_seq_len: int
    max_draft_len: int | None = None  # K

    @classmethod
    def read(cls, args: Any) -> Self:
        """Read the fields of any object that has them.

        Raises:
            ConfigError: there is more than one beam, or a size is no integer of 1 or more.
        """
        beams = getattr(args, "max_beam_width", None)
        if beams not in (None, 1):
            raise ConfigError(f"MTPSampler: max_beam_width must be 1 with speculation, got {beams}")
        slots, length = (
            expect_int(f"MTPSampler: {name}", getattr(args, name, None), 1, error=ConfigError)
            for name in ("max_num_sequences", "max_seq_len")
        )
        return cls(slots, length, max_draft_len=getattr(args, "max_draft_len", None))


def read_reasons(reasons: Any) -> dict[FinishReason, Any]:
    """Map our finish reasons to a host engine's enum; ERROR falls back to CANCELLED."""
    found = {ours: getattr(reasons, ours.name, None) for ours in FinishReason}
    if found[FinishReason.ERROR] is None:
        found[FinishReason.ERROR] = found[FinishReason.CANCELLED]
    return found


def refuse_unserved(
    component: str, arguments: Mapping[str, Any], reasons: Mapping[str, str | None] | None = None
) -> None:
    """Refuse constructor arguments of a host engine that this version does not support.

    Versions of a host engine pass different arguments. None, False, 0, empty values and a
    ``mapping`` of one rank request nothing and are accepted.

    Args:
        component: name of the class, for the message.
        reasons: why an argument is not supported, by its name; None: it is supported.

    Raises:
        ConfigError: there is any other argument; the message has its name and value.
    """
    reasons = reasons or {}
    refused = []
    for name, value in arguments.items():
        if _is_nothing(value) or (name == "mapping" and num_ranks(value) == 1):
            continue
        if name not in reasons:
            refused.append(f"{name}={value!r}")
        elif (reason := reasons[name]) is not None:
            refused.append(f"{name}={value!r} ({reason})")
    if refused:
        raise ConfigError(f"{component}: not served in this version: {', '.join(refused)}")


def num_ranks(mapping: Any) -> int | None:
    """Return the number of ranks of a host engine's mapping: ``world_size``, else the product of
    its parallel sizes; None if it has neither."""
    world = getattr(mapping, "world_size", None)
    if world is not None:
        return int(world)
    sizes = [getattr(mapping, name, None) for name in ("tp_size", "pp_size", "cp_size")]
    given = [size for size in sizes if size is not None]
    return math.prod(given) if given else None


def _is_nothing(value: Any) -> bool:
    plain = (bool, int, float, str, bytes, list, tuple, dict, set)
    return value is None or (isinstance(value, plain) and not value)
