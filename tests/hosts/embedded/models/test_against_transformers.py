"""Target logits and vanilla drafts against transformers' own target and `MtpModel`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from mtp_plugin.hosts.embedded.models import LoadedModel, load_model

DEPTHS = 3
PROMPT_LENGTHS = [1, 2, 3, 4, 5, 6, 17]


class Pair(NamedTuple):
    ours: LoadedModel
    target: PreTrainedModel
    mtp: MtpModel


@pytest.fixture(scope="module", params=["glm4_moe", "deepseek_v3"])
def pair(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Pair:
    path = checkpoint(request.param, num_mtp_layers=DEPTHS, seed=3)
    target = AutoModelForCausalLM.from_pretrained(path).eval()
    # the class names the layer numbers of the real checkpoints only
    first = target.config.num_hidden_layers
    target._keys_to_ignore_on_load_unexpected = {
        rf"model\.layers\.{first + depth}\..*" for depth in range(DEPTHS)
    }
    return Pair(load_model(path), target, MtpModel.from_pretrained(target))


def prompts(length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(2, 512, (3, length), generator=generator)


@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_target_logits(pair: Pair, plain_attention: type, length: int) -> None:
    for prompt in prompts(length):
        states = pair.ours.forward_target(
            prompt, torch.arange(length)[None], plain_attention(length)
        )
        expected = pair.target(prompt[None]).logits[0]
        torch.testing.assert_close(pair.ours.lm_head(states), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_vanilla_drafts(pair: Pair, plain_attention: type, length: int) -> None:
    for prompt in prompts(length):
        theirs = pair.target(prompt[None], output_hidden_states=True)
        emitted = theirs.logits[0, -1].argmax()
        tokens = torch.cat([prompt[1:], emitted[None]])
        expected_ids, expected_logits, _ = pair.mtp(
            input_ids=tokens[None],
            last_hidden_states=theirs.hidden_states[-1],
            attention_mask=torch.ones(1, length),
            # transformers counts from the token of a pair, we from its state
            position_ids=torch.arange(1, length + 1)[None],
            mtp_cache=MtpCache(config=pair.target.config.get_mtp_config()),
        )
        ids, logits = vanilla_drafts(pair.ours, prompt, tokens, plain_attention(length))
        torch.testing.assert_close(logits, expected_logits[0], rtol=0, atol=1e-5)
        assert ids == expected_ids[0].tolist()


def vanilla_drafts(
    model: LoadedModel, prompt: torch.Tensor, tokens: torch.Tensor, attention: object
) -> tuple[list[int], torch.Tensor]:
    positions = torch.arange(len(prompt))[None]
    states = model.forward_target(prompt, positions, attention)
    ids, rows = [], []
    for layer in model.mtp_layers:
        states = layer(
            embed_tokens=model.embed_tokens,
            input_ids=tokens,
            position_ids=positions,
            hidden_states=states,
            attn_metadata=attention,
        )
        rows.append(layer.shared_head(states, model.lm_head, attention))
        draft = rows[-1].argmax(dim=-1)
        ids.append(int(draft))
        tokens = torch.cat([tokens[1:], draft])
    return ids, torch.cat(rows)


def test_greedy_text_with_drafts_of_transformers(pair: Pair) -> None:
    """Their speculative loop on the same checkpoint emits the target's own greedy text."""
    prompt = prompts(5)[:1]
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    options["attention_mask"] = torch.ones_like(prompt)
    plain = pair.target.generate(prompt, **options)
    assert torch.equal(pair.target.generate(prompt, use_mtp=True, **options), plain)
