"""Make `generate(..., use_mtp=True)` of transformers work on checkpoints of any depth."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, PreTrainedModel
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoePreTrainedModel


def mtp_key_patterns(num_hidden_layers: int, num_mtp_layers: int) -> list[str]:
    """One pattern per MTP layer, as `_keys_to_ignore_on_load_unexpected` wants them."""
    return [
        re.escape("model.layers.") + rf"{num_hidden_layers + depth}\..*"
        for depth in range(num_mtp_layers)
    ]


def enable_mtp(model: PreTrainedModel) -> PreTrainedModel:
    """Let a loaded main model know the keys of the MTP layers in its checkpoint.

    transformers 5.17 finds them through a list on the class that names the layer numbers of the
    released GLM-4.5 sizes only; with other sizes the drafter loads nothing and raises.
    """
    config = model.config.get_text_config()
    patterns = mtp_key_patterns(config.num_hidden_layers, config.num_mtp_layers)
    model._keys_to_ignore_on_load_unexpected = patterns
    return model


def load_with_mtp(folder: str | Path, dtype: torch.dtype = torch.float32) -> Glm4MoeForCausalLM:
    """Load the main model, without warnings about the MTP layers, ready for `use_mtp=True`."""
    config = Glm4MoeConfig.from_pretrained(folder)
    with _ignored_keys(mtp_key_patterns(config.num_hidden_layers, config.num_mtp_layers)):
        model: Glm4MoeForCausalLM = Glm4MoeForCausalLM.from_pretrained(folder, dtype=dtype)
    enable_mtp(model.eval())
    return model


@contextmanager
def _ignored_keys(patterns: list[str]) -> Iterator[None]:
    before = Glm4MoePreTrainedModel._keys_to_ignore_on_load_unexpected
    Glm4MoePreTrainedModel._keys_to_ignore_on_load_unexpected = patterns
    try:
        yield
    finally:
        Glm4MoePreTrainedModel._keys_to_ignore_on_load_unexpected = before
