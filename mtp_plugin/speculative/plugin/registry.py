"""Plugin registry by ``decoding_type``: built in, registered, or from an entry point."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from mtp_plugin.errors import PluginError, describe_error, expect, format_value
from mtp_plugin.speculative.drafting import CustomDrafter
from mtp_plugin.speculative.plugin.contract import (
    DraftPlan,
    HostFacts,
    SpeculativePieces,
    SpeculativePlugin,
)
from mtp_plugin.speculative.plugin.custom import CustomDrafterPlugin
from mtp_plugin.speculative.plugin.mtp import MTPPlugin
from mtp_plugin.speculative.plugin.none import NO_SPECULATION, NoSpeculationPlugin

ENTRY_POINT_GROUP = "mtp_plugin.plugins"
DRAFTER_GROUP = "mtp_plugin.drafters"


_BUILT_IN: tuple[SpeculativePlugin, ...] = (MTPPlugin(), NoSpeculationPlugin())


_registered: dict[str, SpeculativePlugin] = {p.decoding_type.lower(): p for p in _BUILT_IN}


def register_plugin(plugin: SpeculativePlugin) -> None:
    """Register ``plugin`` under its decoding type.

    Raises:
        PluginError: the object is not a plugin, or the decoding type is already registered.
    """
    _expect_plugin(plugin, "register_plugin")
    key = plugin.decoding_type.lower()
    existing = _registered.get(key)
    if existing is not None and existing is not plugin:
        raise PluginError(
            f"decoding_type {plugin.decoding_type!r} is already served by {type(existing).__name__}"
        )
    _registered[key] = plugin


def unregister_plugin(decoding_type: str) -> None:
    """Remove a registered plugin; built-in plugins cannot be removed.

    Raises:
        PluginError: the decoding type is built in or has no plugin.
    """
    key = decoding_type.lower()
    if key in {p.decoding_type.lower() for p in _BUILT_IN} or key not in _registered:
        raise PluginError(f"decoding_type {decoding_type!r} has no plugin that could be removed")
    del _registered[key]


def register_drafter(name: str, drafter: CustomDrafter) -> None:
    """Register a drafter in this process; the entry-point group ``mtp_plugin.drafters`` registers
    one in every process.

    Configs then select it with ``speculative_config: {decoding_type: name}``, in any case.

    Raises:
        PluginError: the name is taken or empty, or the object is not a `CustomDrafter`.
    """
    _register_drafter(name, drafter, f"register_drafter({name!r})")


def unregister_drafter(name: str) -> None:
    """Remove a registered drafter: new configs cannot name it. Engines that use it keep it.

    Raises:
        PluginError: no drafter was registered under this name.
    """
    if not isinstance(_registered.get(name.lower()), CustomDrafterPlugin):
        raise PluginError(f"drafter {name!r} was not registered")
    del _registered[name.lower()]


def find_plugin(decoding_type: str | None) -> SpeculativePlugin:
    """Return the plugin of a decoding type: built in, registered, or from an entry point.

    Args:
        decoding_type: name in any case; None: decoding without speculation.

    Raises:
        PluginError: no plugin has this name (the message lists those that exist), or its entry
            point cannot be loaded.
    """
    key = (decoding_type or NO_SPECULATION).lower()
    if key in _registered:
        return _registered[key]
    offered = {point.name.lower(): point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if key in offered:
        plugin = _load_plugin(offered[key])
        register_plugin(plugin)
        return plugin
    drafters = {point.name.lower(): point for point in entry_points(group=DRAFTER_GROUP)}
    if key in drafters:
        point = drafters[key]
        source = f"entry point {point.name!r} of {DRAFTER_GROUP} ({point.value})"
        _register_drafter(point.name, _load(point, source), source)
        return _registered[key]
    names = ", ".join(sorted({*_registered, *offered, *drafters}))
    raise PluginError(f"decoding_type {decoding_type!r} has no plugin; known: {names}")


def make_plan(plugin: SpeculativePlugin, config: Any, num_mtp_layers: int) -> DraftPlan:
    """Call ``plugin.plan`` and check what it returns.

    Raises:
        PluginError: it did not return a `DraftPlan`.
        ConfigError: as :meth:`SpeculativePlugin.plan`.
    """
    plan: object = plugin.plan(config, num_mtp_layers)
    if isinstance(plan, DraftPlan):
        return plan
    raise PluginError(
        f"{type(plugin).__name__}.plan(): expected a DraftPlan, got {format_value(plan)}"
    )


def build_pieces(
    plugin: SpeculativePlugin, config: Any, plan: DraftPlan, host: HostFacts
) -> SpeculativePieces:
    """Call ``plugin.build`` and check what it returns.

    Raises:
        PluginError: it did not return `SpeculativePieces`.
        ConfigError: as :meth:`SpeculativePlugin.build`.
    """
    pieces: object = plugin.build(config, plan, host)
    if isinstance(pieces, SpeculativePieces):
        return pieces
    raise PluginError(
        f"{type(plugin).__name__}.build(): expected SpeculativePieces, got {format_value(pieces)}"
    )


def _register_drafter(name: str, drafter: object, source: str) -> None:
    if not (isinstance(name, str) and name.strip()):
        raise PluginError(f"register_drafter: expected a name, got {format_value(name)}")
    if not isinstance(drafter, CustomDrafter):
        problem = "is a class; create an object of it"
        if not isinstance(drafter, type):
            problem = "does not derive from that class"
        raise PluginError(
            f"{source}: expected a CustomDrafter object, but {format_value(drafter)} {problem}"
        )
    existing = _registered.get(name.lower())
    if isinstance(existing, CustomDrafterPlugin) and existing.drafter is drafter:
        return
    register_plugin(CustomDrafterPlugin(name, drafter))


def _load(point: EntryPoint, source: str) -> Any:
    """Import the object of an entry point; of a class, create one.

    Raises:
        PluginError: it cannot be imported.
    """
    try:
        loaded = point.load()
        return loaded() if isinstance(loaded, type) else loaded
    except (Exception, SystemExit) as error:  # an import may call sys.exit
        raise PluginError(f"{source} cannot be loaded: {describe_error(error)}") from error


def _load_plugin(point: EntryPoint) -> SpeculativePlugin:
    """Import the plugin of an entry point.

    Raises:
        PluginError: it cannot be imported, or is not a plugin.
    """
    source = f"entry point {point.name!r} of {ENTRY_POINT_GROUP} ({point.value})"
    plugin: SpeculativePlugin = _load(point, source)
    _expect_plugin(plugin, source)
    expect(
        plugin.decoding_type.lower() == point.name.lower(),
        PluginError,
        f"{source}: expected a plugin with that decoding_type, got {plugin.decoding_type!r}",
    )
    return plugin


def _expect_plugin(plugin: object, source: str) -> None:
    """Check that an object implements `SpeculativePlugin`.

    Raises:
        PluginError: something is missing.
    """
    name = getattr(plugin, "decoding_type", None)
    if isinstance(plugin, type):
        problem = "is a class"
    elif not (isinstance(name, str) and name):
        problem = f"has decoding_type {format_value(name)}, expected a name"
    else:
        missing = [f"{n}()" for n in ("plan", "build") if not callable(getattr(plugin, n, None))]
        if not missing:
            return
        problem = f"has no {' and no '.join(missing)}"
    raise PluginError(
        f"{source}: expected a SpeculativePlugin object, but {format_value(plugin)} {problem}"
    )
