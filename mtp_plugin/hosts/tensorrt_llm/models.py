"""Install the plugin on import, and register TensorRT-LLM's MTP models as classes of this module.

Each class is an unchanged subclass of the in-tree model under the same architecture name. A rank
imports this module to look up the architecture, and so installs the plugin before it builds the
model.
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
"""Architectures with MTP layers in some API version; those that are installed are registered."""

_REGISTRY = "tensorrt_llm._torch.models.modeling_utils"


def register_models() -> dict[str, type[Any]]:
    """Register and return a subclass of each MTP architecture of the installed TensorRT-LLM.

    Raises:
        PluginError: there is none.
    """
    import_module("tensorrt_llm._torch.models")
    registry = import_module(_REGISTRY)
    registered = {}
    for name in dict.fromkeys([*ARCHITECTURES, *_speculative_architectures(registry)]):
        in_tree = _in_tree_class(registry, name)
        if in_tree is not None:
            ours = types.new_class(name, (in_tree,), exec_body=_set_module)
            registered[name] = registry.register_auto_model(name)(ours)
    if not registered:
        raise PluginError(
            f"{_REGISTRY}: expected one of {', '.join(ARCHITECTURES)} among the registered models, "
            "found none"
        )
    return registered


def _speculative_architectures(registry: Any) -> list[str]:
    """Return the names of all registered architectures that build a speculative worker."""
    base = named("tensorrt_llm._torch.models.modeling_speculative", "SpecDecOneEngineForCausalLM")
    known = getattr(registry, "MODEL_CLASS_MAPPING", {})
    return [name for name, model in known.items() if base is not None and issubclass(model, base)]


def _in_tree_class(registry: Any, name: str) -> type[Any] | None:
    """Return TensorRT-LLM's class of an architecture; newer API versions import it on lookup."""
    look_up = getattr(registry, "get_registered_model_class", None)
    found: type[Any] | None
    found = look_up(name) if look_up is not None else registry.MODEL_CLASS_MAPPING.get(name)
    return found


def _set_module(namespace: dict[str, Any]) -> None:
    namespace["__module__"] = __name__
    namespace["__doc__"] = "TensorRT-LLM's model, in a process with the plugin."


ranks.install_once("custom module")
REGISTERED: Mapping[str, type[Any]] = register_models()
"""Architecture -> class."""
