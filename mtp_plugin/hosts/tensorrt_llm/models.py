"""Install the plugin on import, and register TensorRT-LLM's MTP models as classes of this module.

Each class is an unchanged subclass of the in-tree model under the same architecture name. A rank
that looks the architecture up imports this module and so has the plugin before it builds the model.
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
"""Architectures with MTP layers in some API version; those that the host has are registered."""

_REGISTRY = "tensorrt_llm._torch.models.modeling_utils"


def register_models() -> dict[str, type[Any]]:
    """Register and return a subclass of every MTP architecture that the host has.

    Raises:
        PluginError: the host has none.
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
    """Return the further loaded architectures that build a spec worker."""
    base = named("tensorrt_llm._torch.models.modeling_speculative", "SpecDecOneEngineForCausalLM")
    known = getattr(registry, "MODEL_CLASS_MAPPING", {})
    return [name for name, model in known.items() if base is not None and issubclass(model, base)]


def _in_tree_class(registry: Any, name: str) -> type[Any] | None:
    """Return the host's class for an architecture; newer API versions import it on lookup."""
    look_up = getattr(registry, "get_registered_model_class", None)
    found: type[Any] | None
    found = look_up(name) if look_up is not None else registry.MODEL_CLASS_MAPPING.get(name)
    return found


def _of_this_module(namespace: dict[str, Any]) -> None:
    namespace["__module__"] = __name__
    namespace["__doc__"] = "TensorRT-LLM's model, in a process with the plugin."


ranks.reached_by("custom module")
REGISTERED: Mapping[str, type[Any]] = register_models()
"""Architecture -> class."""
