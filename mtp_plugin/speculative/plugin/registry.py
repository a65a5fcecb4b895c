"""Which plugin answers to a ``decoding_type``: built in, registered, or from an entry point."""

from __future__ import annotations

from importlib.metadata import entry_points

from mtp_plugin.errors import PluginError, expect
from mtp_plugin.speculative.plugin.contract import (
    SpeculativePlugin,
)
from mtp_plugin.speculative.plugin.mtp import MTPPlugin
from mtp_plugin.speculative.plugin.none import NO_SPECULATION, NoSpeculationPlugin

ENTRY_POINT_GROUP = "mtp_plugin.plugins"


_BUILT_IN: tuple[SpeculativePlugin, ...] = (MTPPlugin(), NoSpeculationPlugin())


_registered: dict[str, SpeculativePlugin] = {p.decoding_type.lower(): p for p in _BUILT_IN}


def register_plugin(plugin: SpeculativePlugin) -> None:
    """Make ``plugin`` answer to its decoding type.

    Raises:
        PluginError: the decoding type has another plugin.
    """
    key = plugin.decoding_type.lower()
    existing = _registered.get(key)
    if existing is not None and existing is not plugin:
        raise PluginError(
            f"decoding_type {plugin.decoding_type!r} is already served by {type(existing).__name__}"
        )
    _registered[key] = plugin


def unregister_plugin(decoding_type: str) -> None:
    """Forget a registered plugin; the built-in ones stay.

    Raises:
        PluginError: the decoding type is built in or has no plugin.
    """
    key = decoding_type.lower()
    if key in {p.decoding_type.lower() for p in _BUILT_IN} or key not in _registered:
        raise PluginError(f"decoding_type {decoding_type!r} has no plugin that could be removed")
    del _registered[key]


def find_plugin(decoding_type: str | None) -> SpeculativePlugin:
    """The plugin of a decoding type: built in, registered, or from the entry-point group.

    Args:
        decoding_type: the config's name, in any case; None decodes without speculation.

    Raises:
        PluginError: no plugin has this name; the message lists those that exist.
    """
    key = (decoding_type or NO_SPECULATION).lower()
    if key in _registered:
        return _registered[key]
    offered = {point.name.lower(): point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if key in offered:
        loaded = offered[key].load()
        plugin: SpeculativePlugin = loaded() if isinstance(loaded, type) else loaded
        expect(
            plugin.decoding_type.lower() == key,
            PluginError,
            f"entry point {offered[key].name!r} of {ENTRY_POINT_GROUP}: expected a plugin with "
            f"that decoding_type, got {plugin.decoding_type!r}",
        )
        register_plugin(plugin)
        return plugin
    names = ", ".join(sorted(set(_registered) | set(offered)))
    raise PluginError(f"decoding_type {decoding_type!r} has no plugin; known: {names}")
