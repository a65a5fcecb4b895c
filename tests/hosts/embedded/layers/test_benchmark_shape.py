"""The shape that `bench e2e` times, in bf16: fused layers are as close to fp32 as transformers'."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch

from integration.bench.e2e.subject import SHAPES
from integration.random_models import random_model
from mtp_plugin.hosts.embedded.models import LoadedModel, fuse
from tests.hosts.embedded.layers.causal import Causal

pytestmark = pytest.mark.gpu


@dataclasses.dataclass(frozen=True)
class Logits:
    """Of the target and of the MTP layer, [rows, V] each."""

    target: torch.Tensor
    draft: torch.Tensor


def logits_of(model: LoadedModel, rows: int, *, own_modules: bool = False) -> Logits:
    """One causal pass; ``own_modules``: through transformers' modules under a fused model."""
    ids = torch.arange(rows, device="cuda") * 977 % 129280
    positions = torch.arange(rows, device="cuda")[None]
    attention = Causal(rows)
    rng = torch.Generator("cuda").manual_seed(rows)
    sampled = torch.randn(rows, 4096, generator=rng, device="cuda").to(torch.bfloat16)
    layer, head, forward = model.mtp_layers[0], model.lm_head, type(model).forward_target
    if own_modules:
        layer, head, forward = layer.layer, model.target.lm_head, LoadedModel.forward_target
    states = forward(model, ids, positions, attention)
    drafted = layer(
        embed_tokens=model.embed_tokens,
        input_ids=ids,
        position_ids=positions,
        hidden_states=sampled.to(states.dtype),
        attn_metadata=attention,
    )
    draft = layer.shared_head(drafted, head, attention, return_all=True)
    return Logits(head(states).float(), draft.float())


class Case:
    """One draw of weights: fused, under transformers' modules, and in fp32."""

    def __init__(self) -> None:
        base = random_model(device="cuda", dtype=torch.bfloat16, **SHAPES["8gb"])
        for module in (base.target, *base.mtp_layers.modules()):
            if getattr(module, "config", None) is not None:
                module.config._experts_implementation = "eager"
        self.truth = dataclasses.replace(
            base,
            target=copy.deepcopy(base.target).float(),
            mtp_layers=copy.deepcopy(base.mtp_layers).float(),
        )
        self.fused = fuse(base)


@pytest.fixture(scope="module")
def case() -> Iterator[Case]:
    yield Case()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("rows", [1, 64, 256])
@torch.inference_mode()
def test_fused_layers_are_as_close_to_fp32_as_transformers(
    case: Case, rows: int, record_property: Callable[[str, object], None]
) -> None:
    model = case.fused
    truth, fused = logits_of(case.truth, rows), logits_of(model, rows)
    theirs = logits_of(model, rows, own_modules=True)
    for name in ("target", "draft"):
        true, ours, other = (getattr(logits, name) for logits in (truth, fused, theirs))
        far = [(logits - true).square().mean(-1).sqrt() for logits in (ours, other)]
        same = [(logits.argmax(-1) == true.argmax(-1)).sum().item() for logits in (ours, other)]
        # a row whose router chose other experts than in fp32 differs much
        astray = [int((error > 4 * far[1].median()).sum()) for error in far]
        found = (
            f"{name}: distance from fp32 (root mean square, median row) {far[0].median():.4f},"
            f" transformers' {far[1].median():.4f}, of {true.std():.2f}; rows far off"
            f" {astray[0]}, {astray[1]}; fp32's argmax in {same[0]}, {same[1]} of {rows}; like"
            f" transformers' in {(ours.argmax(-1) == other.argmax(-1)).sum().item()}"
        )
        record_property(name, found)
        assert far[0].median() <= 1.15 * far[1].median(), found
        assert astray[0] <= astray[1] + 2 + rows // 32, found
        assert same[0] >= same[1] - 2 - rows // 16, found
