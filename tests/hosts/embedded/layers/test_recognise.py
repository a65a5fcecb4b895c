"""What counts as known code, and every way in which a module may not be it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.gemma import modeling_gemma as gemma
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from mtp_plugin.hosts.embedded.layers import recognise
from mtp_plugin.hosts.embedded.layers.recognise import same_code
from mtp_plugin.hosts.embedded.models import LoadedModel, load_model

FP32 = torch.float32


@pytest.fixture(scope="module")
def glm_model(checkpoint: Callable[..., Path]) -> LoadedModel:
    return load_model(checkpoint("glm4_moe", first_k_dense_replace=1))


@pytest.fixture
def parts(glm_model: LoadedModel) -> dict[str, Any]:
    """Copies of a decoder's modules, to be spoilt."""
    decoder = copy.deepcopy(glm_model.target.get_decoder())
    dense, sparse = decoder.layers
    return {
        "decoder": decoder,
        "rotary": decoder.rotary_emb,
        "layer": dense,
        "norm": dense.input_layernorm,
        "attention": dense.self_attn,
        "mlp": dense.mlp,
        "mixture": sparse.mlp,
    }


RECOGNISE: dict[str, Callable[[Any], Any]] = {
    "decoder": recognise.is_decoder,
    "rotary": recognise.is_rotary,
    "layer": recognise.is_decoder_layer,
    "norm": lambda module: recognise.norm_of(module, FP32),
    "attention": lambda module: recognise.attention_of(module, FP32),
    "mlp": lambda module: recognise.mlp_of(module, FP32),
    "mixture": lambda module: recognise.mixture_of(module, FP32),
}


def test_code_is_compared_under_any_name() -> None:
    assert same_code(glm.Glm4MoeRMSNorm.forward, deepseek.DeepseekV3RMSNorm.forward)
    assert same_code(glm.Glm4MoeMLP.forward, deepseek.DeepseekV3MLP.forward)
    assert not same_code(glm.Glm4MoeRMSNorm.forward, gemma.GemmaRMSNorm.forward)
    assert not same_code(glm.Glm4MoeAttention.forward, qwen2.Qwen2Attention.forward)
    assert not same_code(glm.apply_rotary_pos_emb, qwen2.apply_rotary_pos_emb)
    assert not same_code(len, glm.rotate_half)


FUNCTION = """
def {name}(x, scale={default}):
    {doc!r}
    return x * scale + {added}
"""


def function(name: str = "f", default: str = "1.0", doc: str = "One.", added: str = "1") -> Any:
    made: dict[str, Any] = {}
    exec(FUNCTION.format(name=name, default=default, doc=doc, added=added), made)
    return made[name]


def test_constants_names_and_defaults_are_compared() -> None:
    assert same_code(function(), function(name="g", doc="Overridden."))
    for change in ({"added": "2"}, {"added": "True"}, {"default": "2.0"}):
        assert not same_code(function(), function(**change))


@pytest.mark.parametrize("name", RECOGNISE)
def test_a_module_with_a_hook_or_another_forward_is_left(parts: dict[str, Any], name: str) -> None:
    recognised, module = RECOGNISE[name], parts[name]
    assert recognised(module)
    handle = module.register_forward_hook(lambda *_: None)
    assert not recognised(module)
    handle.remove()
    cls = type(module)
    module.__class__ = type(cls.__name__, (cls,), {"forward": lambda *args: args})
    assert not recognised(module)
    module.__class__ = type("Renamed", (cls,), {})
    assert recognised(module)
    module.forward = lambda *_, **__: None
    assert not recognised(module)


def linear_with_bias(_: Any) -> nn.Linear:
    return nn.Linear(64, 96)


SPOILT = {
    "norm in another dtype": ("norm", lambda norm: norm.to(torch.float64)),
    "query with a class of its own": (
        "attention",
        lambda a: setattr(a, "q_proj", type("Odd", (nn.Linear,), {})(64, 64)),
    ),
    "one bias missing": ("attention", lambda a: setattr(a.k_proj, "bias", None)),
    "head norm of another kind": ("attention", lambda a: setattr(a, "q_norm", nn.Identity())),
    "output hooked": ("attention", lambda a: a.o_proj.register_forward_pre_hook(print)),
    "mlp with biases": ("mlp", lambda mlp: setattr(mlp, "gate_proj", linear_with_bias(mlp))),
    "another activation": ("mlp", lambda mlp: setattr(mlp, "act_fn", nn.GELU())),
    "mixture with another activation": (
        "mixture",
        lambda moe: setattr(moe.experts, "act_fn", nn.GELU()),
    ),
    "experts with biases": ("mixture", lambda moe: setattr(moe.experts, "has_bias", True)),
    "transposed experts": ("mixture", lambda moe: setattr(moe.experts, "is_transposed", True)),
    "experts without a gate": ("mixture", lambda moe: setattr(moe.experts, "has_gate", False)),
    "router hooked": ("mixture", lambda moe: moe.gate.register_forward_hook(print)),
    "shared experts hooked": (
        "mixture",
        lambda moe: moe.shared_experts.register_forward_hook(print),
    ),
    "half-precision bias of the router": ("mixture", lambda moe: moe.gate.half()),
    "experts in another dtype": ("mixture", lambda moe: moe.experts.half()),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_module_with_a_part_that_differs_is_left(parts: dict[str, Any], case: str) -> None:
    name, spoil = SPOILT[case]
    spoil(parts[name])
    assert not RECOGNISE[name](parts[name])


def test_attention_without_head_norms(checkpoint: Callable[..., Path]) -> None:
    model = load_model(checkpoint("glm4_moe", use_qk_norm=False, attention_bias=False))
    found = recognise.attention_of(model.target.model.layers[0].self_attn, FP32)
    assert found is not None
    assert found.norms is None


def test_attention_of_a_window_is_left(checkpoint: Callable[..., Path]) -> None:
    attention = load_model(checkpoint("mimo")).target.model.layers[0].self_attn
    assert recognise.attention_of(attention, FP32) is not None
    attention.sliding_window = 4
    assert recognise.attention_of(attention, FP32) is None


def test_another_rotation_in_the_file_is_left(
    parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(glm, "rotate_half", lambda x: x)
    assert recognise.attention_of(parts["attention"], FP32) is None
    monkeypatch.undo()
    monkeypatch.setattr(glm, "apply_rotary_pos_emb", deepseek.apply_rotary_pos_emb_interleave)
    assert recognise.attention_of(parts["attention"], FP32) is None


def test_a_decoder_with_windows_is_left(parts: dict[str, Any]) -> None:
    parts["decoder"].has_sliding_layers = True
    assert not recognise.is_decoder(parts["decoder"])


def test_centred_norms_and_their_layers_are_left(checkpoint: Callable[..., Path]) -> None:
    decoder = load_model(checkpoint("qwen3_next")).target.model
    assert recognise.norm_of(decoder.norm, FP32) is None
    assert not recognise.is_decoder_layer(decoder.layers[0])
    assert recognise.attention_of(decoder.layers[0].self_attn, FP32) is None
    assert recognise.mixture_of(decoder.layers[0].mlp, FP32) is None
    assert type(decoder.norm) is qwen3_next.Qwen3NextRMSNorm


def test_embeddings() -> None:
    assert recognise.is_embedding(nn.Embedding(3, 4))
    assert not recognise.is_embedding(nn.Embedding(3, 4, max_norm=1.0))
    assert not recognise.is_embedding(type("Scaled", (nn.Embedding,), {})(3, 4))
    assert not recognise.is_embedding(torch.nn.functional.embedding)
