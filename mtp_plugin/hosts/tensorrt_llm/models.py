"""Importing this installs the plugin, and registers TensorRT-LLM's MTP models once more, as ours.

Each class is the in-tree one under its checkpoint's own architecture name, with nothing changed but
the module that it is of: a rank that looks the architecture up imports this module, and so has the
plugin before it builds the model.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from mtp_plugin.errors import PluginError
from mtp_plugin.hosts.tensorrt_llm import ranks
from mtp_plugin.hosts.tensorrt_llm.seams import named

ARCHITECTURES = (
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepseekV4ForCausalLM",
    "ExaoneMoEForCausalLM",
    "Glm4MoeForCausalLM",
    "GlmMoeDsaForCausalLM",
    "NemotronHForCausalLM",
    "NemotronHPuzzleForCausalLM",
    "Qwen3NextForCausalLM",
)
"""Those with MTP layers in some line; a line registers those that it has, and others like them."""

_REGISTRY = "tensorrt_llm._torch.models.modeling_utils"


def register_models() -> dict[str, type[Any]]:
    """Register a subclass for every architecture that the host has, and return them.

    Raises:
        PluginError: the host has none of them.
    """
    import_module("tensorrt_llm._torch.models")
    registry = import_module(_REGISTRY)
    registered = {}
    for name in dict.fromkeys([*ARCHITECTURES, *_drafting(registry)]):
        in_tree = _in_tree_class(registry, name)
        if in_tree is not None:
            ours = types.new_class(name, (in_tree,), exec_body=_of_this_module)
            registered[name] = registry.register_auto_model(name)(ours)
    if not registered:
        raise PluginError(
            f"{_REGISTRY}: expected one of {', '.join(ARCHITECTURES)} among the registered models, "
            "found none"
        )
    return registered


def _drafting(registry: Any) -> list[str]:
    """Further architectures that the host has loaded and that build a spec worker."""
    base = named("tensorrt_llm._torch.models.modeling_speculative", "SpecDecOneEngineForCausalLM")
    known = getattr(registry, "MODEL_CLASS_MAPPING", {})
    return [name for name, model in known.items() if base is not None and issubclass(model, base)]


def _in_tree_class(registry: Any, name: str) -> type[Any] | None:
    """What the host builds for an architecture; newer lines import it when it is asked for."""
    look_up = getattr(registry, "get_registered_model_class", None)
    found: type[Any] | None
    found = look_up(name) if look_up is not None else registry.MODEL_CLASS_MAPPING.get(name)
    return found


def _of_this_module(namespace: dict[str, Any]) -> None:
    namespace["__module__"] = __name__
    namespace["__doc__"] = "TensorRT-LLM's own, in a process that has the plugin."


ranks.reached_by("custom module")
REGISTERED: Mapping[str, type[Any]] = register_models()
"""Architecture -> class."""
