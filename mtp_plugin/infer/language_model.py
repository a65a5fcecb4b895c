"""Interface of a language model with an external KV cache, and its transformers implementation."""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mtp_plugin.errors import CheckpointError, TensorContractError, UnsupportedModelError
from mtp_plugin.extras import require
from mtp_plugin.infer.kv_cache import KVCache, KVState

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


@cache
def cache_argument() -> str:
    """Return the name of the KV cache among the arguments of transformers' models and layers.

    Newer versions call it ``cache`` and warn about ``past_key_values``.
    """
    from transformers.masking_utils import create_causal_mask

    newer = "cache" in inspect.signature(create_causal_mask).parameters
    return "cache" if newer else "past_key_values"


def transformers_arguments(**named: Any) -> dict[str, Any]:
    """Return arguments with ``past_key_values`` under the name of `cache_argument`."""
    return {cache_argument() if name == "past_key_values" else name: v for name, v in named.items()}


class LanguageModel(Protocol):
    """A causal language model with an external KV cache.

    A model with several EOS tokens also has an attribute `eos_token_ids`.
    """

    @property
    def eos_token_id(self) -> int:
        """The EOS token id.

        Raises:
            CheckpointError: (a ValueError) the model's config has none.
        """
        ...

    def forward(self, query_token_ids: torch.Tensor, kv_cache: KVCache) -> torch.Tensor:
        """Return the logits of every query token.

        Args:
            query_token_ids: [B, Q], the tokens after those in the cache.
            kv_cache: read, and updated by the Q tokens.

        Returns:
            [B, Q, V].
        """
        ...


class TransformersLanguageModel:
    """A transformers causal language model as a `LanguageModel`.

    The cache stores what each layer caches, so models with latent attention work too.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Wrap a model that is on its device and in eval mode.

        Raises:
            UnsupportedModelError: the model has layers that keep a recurrent state.
            MissingExtraError: transformers is not installed.
        """
        require("mtp_plugin.infer.TransformersLanguageModel", "transformers")
        config: Any = model.config.get_text_config()
        layer_types = set(getattr(config, "layer_types", None) or ())
        odd = sorted(layer_types - set(ATTENTION_LAYER_TYPES))
        if odd:
            raise UnsupportedModelError(
                f"{type(model).__name__}: expected layers of types "
                f"{', '.join(ATTENTION_LAYER_TYPES)}, got {', '.join(odd)}"
            )
        self.model = model
        self._eos = config.eos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All EOS token ids; empty if the config has none."""
        if self._eos is None:
            return ()
        return tuple(self._eos) if isinstance(self._eos, (list, tuple)) else (self._eos,)

    @property
    def eos_token_id(self) -> int:
        """The first EOS token id; see `LanguageModel.eos_token_id`."""
        if not self.eos_token_ids:
            raise CheckpointError(
                f"{type(self.model).__name__}: expected an eos_token_id in the config, got none"
            )
        return self.eos_token_ids[0]

    def forward(self, query_token_ids: torch.Tensor, kv_cache: KVCache) -> torch.Tensor:
        """Return logits [B, Q, V]; see `LanguageModel.forward`.

        Raises:
            TensorContractError: the query is not [B, Q] with at least one token.
        """
        if query_token_ids.dim() != 2 or query_token_ids.numel() == 0:
            raise TensorContractError(
                "query_token_ids: expected [B, Q] with at least one token, "
                f"got {list(query_token_ids.shape)}"
            )
        from transformers import DynamicCache

        past = kv_cache.get_num_tokens()
        states = DynamicCache(kv_cache.get_kv_states() or None)
        num_new = query_token_ids.shape[1]
        positions = torch.arange(past, past + num_new, device=query_token_ids.device)
        model: Any = self.model
        with torch.no_grad():
            logits: torch.Tensor = model(
                input_ids=query_token_ids,
                position_ids=positions.expand(query_token_ids.shape[0], num_new),
                **transformers_arguments(past_key_values=states, use_cache=True),
            ).logits
        kv_cache.update(
            [KVState(keys[:, :, past:], values[:, :, past:]) for keys, values, _ in states]
        )
        return logits
