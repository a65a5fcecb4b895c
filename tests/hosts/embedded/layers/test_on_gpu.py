"""Experts at the shapes of a real model in bf16, and whole models in CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig

from integration.random_models import random_model
from mtp_plugin.hosts.embedded.layers.experts import RouterRule, assign, block_rows_for
from mtp_plugin.hosts.embedded.layers.fused_layers import FusedMixture
from mtp_plugin.hosts.embedded.layers.mlp import silu_mul
from mtp_plugin.hosts.embedded.layers.packing import Packer
from mtp_plugin.hosts.embedded.layers.recognise import mixture_of
from mtp_plugin.hosts.embedded.models import FusedModel, LoadedModel, fuse
from mtp_plugin.ops.backend import Backend
from tests.hosts.embedded.layers.causal import Causal
from tests.ops.top_k.launches import captured

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
HIDDEN, EXPERT_WIDTH = 4096, 1408


def random_tensor(
    *shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = BF16
) -> torch.Tensor:
    rng = torch.Generator("cuda").manual_seed(seed)
    return (scale * torch.randn(shape, generator=rng, device="cuda")).to(dtype)


def assert_as_good_as(actual: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor) -> None:
    """No farther from the fp32 result than another bf16 result is, with a little room."""
    far = (theirs.float() - truth).abs().max()
    assert (actual.float() - truth).abs().max() <= 1.5 * far + 1e-3


@pytest.fixture(scope="module")
def mixture() -> glm.Glm4MoeMoE:
    config = Glm4MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=EXPERT_WIDTH,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
    )
    config._experts_implementation = "eager"
    with torch.device("cuda"):
        module = glm.Glm4MoeMoE(config).to(BF16)
    module.gate.e_score_correction_bias.data = random_tensor(8, scale=0.1, dtype=torch.float32)
    for seed, weight in enumerate(module.parameters()):
        weight.requires_grad_(False).copy_(random_tensor(*weight.shape, seed=seed, scale=0.02))
    return module.eval()


@pytest.mark.parametrize("rows", [1, 33, 1000])
def test_mixture(mixture: glm.Glm4MoeMoE, rows: int) -> None:
    found = mixture_of(mixture, BF16)
    assert found is not None
    fused = FusedMixture(found, Backend.TRITON, Packer())
    x = random_tensor(rows, HIDDEN, seed=rows)
    theirs = mixture(x[None])[0]
    # experts one by one in fp32, for the rows that the router gave them
    _, weights, ids = mixture.gate(x)
    shared = mixture.shared_experts
    truth = functional.linear(
        silu_mul(
            functional.linear(
                x.float(), torch.cat([shared.gate_proj.weight, shared.up_proj.weight]).float()
            ),
            backend=Backend.TORCH,
        ),
        shared.down_proj.weight.float(),
    )
    for expert in range(8):
        chosen = (ids == expert).any(-1).nonzero()[:, 0]
        gate_up = mixture.experts.gate_up_proj[expert].float()
        active = silu_mul(functional.linear(x[chosen].float(), gate_up), backend=Backend.TORCH)
        out = functional.linear(active, mixture.experts.down_proj[expert].float())
        weight = (weights * (ids == expert)).sum(-1)[chosen]
        truth.index_add_(0, chosen, out * weight[:, None])
    assert_as_good_as(fused(x), theirs, truth)


@pytest.mark.parametrize(("rows", "num_experts", "top_k"), [(1, 8, 2), (256, 8, 2), (16, 160, 8)])
def test_routing(rows: int, num_experts: int, top_k: int) -> None:
    logits = random_tensor(rows, num_experts, dtype=torch.float32)
    bias = random_tensor(num_experts, seed=1, scale=0.1, dtype=torch.float32)
    rule = RouterRule(top_k, 1, 1, True, 1.0)
    block_rows = block_rows_for(rows)
    ours, theirs = (
        assign(logits, bias, rule, shared=1, block_rows=block_rows, backend=backend)
        for backend in (Backend.TRITON, Backend.TORCH)
    )
    assert torch.equal(ours.filled, theirs.filled)
    used = torch.arange(block_rows, device="cuda") < ours.filled[:, None]
    assert torch.equal(ours.pairs * used, theirs.pairs * used)
    assert torch.equal(ours.expert[used[:, 0]], theirs.expert[used[:, 0]])
    torch.testing.assert_close(ours.weights, theirs.weights)


def a_model(dtype: torch.dtype) -> LoadedModel:
    return random_model(
        "glm4_moe",
        device="cuda",
        dtype=dtype,
        num_hidden_layers=3,
        first_k_dense_replace=2,
        hidden_size=512,
        intermediate_size=1376,
        moe_intermediate_size=352,
        n_routed_experts=8,
        num_attention_heads=8,
        head_dim=64,
        vocab_size=2000,
    )


def step(model: LoadedModel, ids: torch.Tensor, attention: Causal) -> tuple[torch.Tensor, ...]:
    positions = torch.arange(ids.shape[0], device="cuda")[None]
    states = model.forward_target(ids, positions, attention)
    drafted = model.mtp_layers[0](
        embed_tokens=model.embed_tokens,
        input_ids=ids,
        position_ids=positions,
        hidden_states=states,
        attn_metadata=attention,
    )
    return model.lm_head(states), model.mtp_layers[0].shared_head(drafted, model.lm_head, attention)


@pytest.mark.parametrize("rows", [1, 200])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (BF16, 6e-2)])
@torch.inference_mode()
def test_whole_model_in_a_graph(dtype: torch.dtype, tolerance: float, rows: int) -> None:
    model = a_model(dtype)
    fused: FusedModel = fuse(model)
    assert fused.report.kernels == "triton"
    assert fused.report.left == ()
    ids = torch.arange(rows, device="cuda") * 3 % 2000
    attention = Causal(rows)
    graph, outputs = captured(lambda: step(fused, ids, attention))
    for shift in (0, 5):
        ids.add_(shift)
        graph.replay()
        # the modules of the fused model are still transformers' own
        states = LoadedModel.forward_target(
            fused, ids, torch.arange(rows, device="cuda")[None], attention
        )
        theirs = model.target.lm_head(states)
        torch.testing.assert_close(outputs[0], theirs, rtol=0, atol=tolerance)
        eager = step(fused, ids, attention)
        for replayed, expected in zip(outputs, eager, strict=True):
            torch.testing.assert_close(replayed, expected, rtol=0, atol=tolerance)
