"""What the pieces need of a host's decoding config, and of the plugin's own options beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.hosts.tensorrt_llm.side_file import options_of
from mtp_plugin.speculative.host import DecodingOptions, is_vanilla
from mtp_plugin.verifications import WAYS


@dataclass(frozen=True)
class HostOptions:
    """A host's config as the pieces read it."""

    decoding: DecodingOptions
    is_vanilla: bool


_ONE_VALUE = {"draft_skip_top_k_top_p": False, "advanced_sampling_mode": "full"}
"""Options of a host's config that are served as they are by default alone."""


def serves(spec_config: Any) -> bool:
    """Whether a host's config is one that the plugin answers for: MTP in one engine, linear drafts
    of MTP heads."""
    mode = getattr(spec_config, "spec_dec_mode", None)
    if mode is None:
        return False
    if not any(
        getattr(mode, name, bool)() for name in ("is_mtp_vanilla", "is_mtp_eagle_one_model")
    ):
        return False
    others = ("use_dynamic_tree", "_use_shared_kv_cache")  # drafters that are no MTP layers
    return not any(getattr(spec_config, name, False) for name in others)


def read_options(spec_config: Any) -> HostOptions:
    """The options of a host's config; K is what it says by now.

    The plugin's own are its ``mtp``, else the side file's (`options_of`).

    Raises:
        ConfigError: an option that cannot be, or one that this host cannot serve.
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
    for name, only in _ONE_VALUE.items():
        value = getattr(spec_config, name, only)
        value = getattr(value, "value", value)  # an enum of the host's
        expect(
            value == only,
            ConfigError,
            f"{name}: expected {only!r}, got {value!r}: mtp_plugin cuts drafts as their targets "
            "are cut, and leaves no cut out",
        )
    odds = [way for way in mtp.verifications if not WAYS[way].keeps_text]
    if getattr(spec_config, "use_rejection_sampling", False):
        odds.append("use_rejection_sampling")
    expect(
        not odds,
        ConfigError,
        f"{', '.join(odds)}: not served inside TensorRT-LLM, which fills up drafts that nobody "
        "drew; leave it out: coupled verification serves requests that draw",
    )
    decoding = replace(DecodingOptions.read(spec_config), mtp=mtp)
    return HostOptions(decoding, is_vanilla(spec_config.spec_dec_mode))
