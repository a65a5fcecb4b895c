"""Read TensorRT-LLM's decoding config and the plugin's own options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.hosts.tensorrt_llm.side_file import options_of
from mtp_plugin.speculative.host import DecodingOptions, is_vanilla
from mtp_plugin.verifications import METHODS


@dataclass(frozen=True)
class HostOptions:
    """The options of a host's config that our components use."""

    decoding: DecodingOptions
    is_vanilla: bool


_TRUNCATION = "mtp_plugin truncates the distributions of drafts and targets alike"
_ONE_VALUE: dict[str, tuple[Any, str]] = {
    "draft_skip_top_k_top_p": (False, _TRUNCATION),
    "advanced_sampling_mode": ("full", _TRUNCATION),
    "spec_dec_variant": (1, "mtp_plugin has one way to draft and verify"),
}
"""Options of a host's config of which only the default is served, and why."""


def serves(spec_config: Any) -> bool:
    """Whether the plugin serves a config: one-engine MTP with linear drafts of MTP layers."""
    mode = getattr(spec_config, "spec_dec_mode", None)
    if mode is None:
        return False
    if not any(
        getattr(mode, name, bool)() for name in ("is_mtp_vanilla", "is_mtp_eagle_one_model")
    ):
        return False
    others = ("use_dynamic_tree", "_use_shared_kv_cache")  # other drafters than MTP layers
    return not any(getattr(spec_config, name, False) for name in others)


def read_options(spec_config: Any) -> HostOptions:
    """Read the options of a host's config with its current K.

    The plugin's own options come from its ``mtp``, else from the side file (`options_of`).

    Raises:
        ConfigError: an option is invalid or cannot be served inside this host.
    """
    mtp = options_of(spec_config)
    expect(
        getattr(spec_config, "sa_config", None) is None,
        ConfigError,
        "sa_config: not served with mtp_plugin: drafts are those of MTP layers; leave it out, or "
        "uninstall() the plugin",
    )
    expect(
        mtp.draft_vocab is None,
        ConfigError,
        "mtp.draft_vocab: not served inside TensorRT-LLM, whose draft layers have the target's "
        "head",
    )
    expect(
        not mtp.adaptive_draft_len,
        ConfigError,
        "mtp.adaptive_draft_len: not served inside TensorRT-LLM, whose ranks would measure "
        "different times and draft different numbers of tokens; use draft_len_schedule",
    )
    for name, (only, why) in _ONE_VALUE.items():
        value = getattr(spec_config, name, only)
        value = getattr(value, "value", value)  # an enum of the host's
        expect(
            value == only,
            ConfigError,
            f"{name}: expected {only!r}, got {value!r}: {why}",
        )
    refused = [
        name for name in mtp.verifications if name not in METHODS or not METHODS[name].keeps_output
    ]
    if getattr(spec_config, "use_rejection_sampling", False):
        refused.append("use_rejection_sampling")
    expect(
        not refused,
        ConfigError,
        f"{', '.join(refused)}: not served inside TensorRT-LLM, which pads drafts with tokens that "
        "were not sampled; leave it out: coupled verification serves sampled requests",
    )
    decoding = replace(DecodingOptions.read(spec_config), mtp=mtp)
    return HostOptions(decoding, is_vanilla(spec_config.spec_dec_mode))
