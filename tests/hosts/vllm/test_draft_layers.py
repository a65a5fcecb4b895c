"""Fused layers in draft models that are not compiled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mtp_plugin.hosts.vllm.draft_layers import fuse_norms, fuse_rotary


class Norm(nn.Module):
    """The attributes and methods of vLLM's ``RMSNorm`` that are used."""

    def __init__(self, dtype: torch.dtype = torch.float32, has_weight: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0, dtype=dtype))
        self.pass_weight = self.pass_weight_add = has_weight
        self.variance_epsilon = 1e-6
        self.variance_size_override = None
        self._forward_method = self.forward_native

    def forward(self, *args: Any) -> Any:
        return self._forward_method(*args)

    def forward_native(self, *args: Any) -> Any:
        return ("native", *args)


class OtherNorm(Norm):
    """Computes something else."""


def make_op(name: str, supported: bool = True) -> Any:
    def supports_args(*args: Any) -> bool:
        return args[-3] is None or args[-3].dtype == args[0].dtype

    kernel = SimpleNamespace(
        supported=supported,
        supports_args=supports_args,
        impl_fn=lambda *args: (name, *args),
    )
    return SimpleNamespace(impls={"native": None, "vllm_c": kernel})


def test_norms_call_the_fused_kernels() -> None:
    model = nn.ModuleList([Norm(), nn.ModuleList([Norm(has_weight=False)]), OtherNorm()])
    assert fuse_norms(model, Norm, make_op("norm"), make_op("add_norm")) == 2
    x, residual = torch.zeros(2, 4), torch.ones(2, 4)
    name, given, weight, eps, size = model[0](x)
    assert (name, eps, size) == ("norm", 1e-6, None)
    assert given is x
    assert weight.tolist() == [2.0] * 4
    name, given, added, weight, *_ = model[0](x, residual)
    assert name == "add_norm"
    assert given is x
    assert added is residual
    assert weight.tolist() == [2.0] * 4
    assert model[1][0](x)[2] is None
    assert model[2](x) == ("native", x)


def test_arguments_that_a_kernel_does_not_take_are_left_to_vllm() -> None:
    norm = Norm(dtype=torch.bfloat16)
    assert fuse_norms(norm, Norm, make_op("norm"), make_op("add_norm")) == 1
    x = torch.zeros(2, 4)
    assert norm(x) == ("native", x, None)


@pytest.mark.parametrize("op", [make_op("norm", supported=False), SimpleNamespace(impls={})])
def test_nothing_changes_without_kernels(op: Any) -> None:
    norm = Norm()
    assert fuse_norms(norm, Norm, make_op("norm"), op) == 0
    assert norm(1) == ("native", 1)


@pytest.mark.parametrize("missing", ["pass_weight", "variance_size_override", "forward_native"])
def test_norms_without_an_attribute_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    norm = Norm()
    if missing == "forward_native":
        monkeypatch.delattr(Norm, missing)
    else:
        delattr(norm, missing)
    assert fuse_norms(norm, Norm, make_op("norm"), make_op("add_norm")) == 0


@pytest.mark.parametrize("missing", ["supports_args", "impl_fn", "supported"])
def test_nothing_changes_with_other_kernels(missing: str) -> None:
    op = make_op("norm")
    delattr(op.impls["vllm_c"], missing)
    assert fuse_norms(Norm(), Norm, op, make_op("add_norm")) == 0
    assert fuse_norms(Norm(), Norm, object(), op) == 0


@pytest.mark.parametrize(("do_not_compile", "fused"), [(False, 0), (True, 1)])
def test_compiled_models_stay_as_they_are(do_not_compile: bool, fused: int) -> None:
    model = nn.ModuleList([Norm()])
    model.do_not_compile = do_not_compile  # set by vLLM's support_torch_compile
    assert fuse_norms(model, Norm, make_op("norm"), make_op("add_norm")) == fused


class Rotary(nn.Module):
    """The methods of vLLM's ``RotaryEmbedding`` that are used."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos_sin_cache", torch.ones(3))
        self._forward_method = self.forward_native

    def forward(self, *args: Any) -> Any:
        return self._forward_method(*args)

    def forward_native(self, *args: Any) -> Any:
        return ("native", *args)

    def forward_cuda(self, *args: Any) -> Any:
        return ("fused", self.cos_sin_cache.sum().item(), *args)


class InheritsRotary(Rotary):
    """Another table of angles."""


class OtherRotary(Rotary):
    def forward_native(self, *args: Any) -> Any:
        return ("other", *args)


def layer_with(rotary: nn.Module) -> nn.Module:
    layer = nn.Module()
    layer.rotary_emb = rotary
    return layer


def test_draft_layers_get_a_fused_copy_of_the_rotary_embedding_that_they_share() -> None:
    shared = Rotary()
    draft = nn.ModuleList([layer_with(shared), nn.ModuleList([layer_with(shared)])])
    assert fuse_rotary(draft, Rotary) == 1
    assert draft[0].rotary_emb(1) == draft[1][0].rotary_emb(1) == ("fused", 3.0, 1)
    assert shared(1) == ("native", 1)


@pytest.mark.parametrize(
    ("kind", "answer"), [(InheritsRotary, ("fused", 3.0, 1)), (OtherRotary, ("other", 1))]
)
def test_rotary_embeddings_with_their_own_computation_stay(kind: Any, answer: Any) -> None:
    draft = nn.ModuleList([layer_with(kind())])
    fuse_rotary(draft, Rotary)
    assert draft[0].rotary_emb(1) == answer


def test_rotary_embeddings_of_compiled_models_and_other_versions_stay() -> None:
    draft = nn.ModuleList([layer_with(Rotary())])
    assert fuse_rotary(draft, object) == 0
    draft.do_not_compile = False
    assert fuse_rotary(draft, Rotary) == 0
    assert draft[0].rotary_emb(1) == ("native", 1)
