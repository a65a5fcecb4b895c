"""Minimal drafter that uses a model's MTP layers.

An MTP layer reads the target's hidden state at each token together with the next token, and
predicts the token after that: for the tokens ``p q r s`` and the new token ``t`` it reads
``q r s t`` and drafts ``u``. Vanilla: a second layer drafts the next token from the first layer's
hidden states and the tokens ``r s t u``. Eagle: the same layer drafts it from its own last hidden
state and ``u``, at the next position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import torch
from torch import nn

from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.infer.kv_cache import DynamicKVCache, KVCache, KVState
from mtp_plugin.infer.language_model import TransformersLanguageModel
from mtp_plugin.infer.logprobs import usable
from mtp_plugin.infer.noise import Role
from mtp_plugin.infer.sampling_rule import NO_TOKEN, SamplingRule
from mtp_plugin.infer.speculation import Draft

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Chain: TypeAlias = Literal["output", "target_shift", "none"]
"""Hidden states that layer i + 1 reads: the output of layer i; the target's shifted by one plus the
last output row of layer i; or the target's."""

CAUSAL_ATTENTION = "sdpa"
"""transformers' attention that is causal without a mask while nothing is cached."""


class MTPModel(Protocol):
    """A target model with its MTP layers, in eval mode and without gradients."""

    @property
    def target(self) -> PreTrainedModel:
        """A causal language model."""
        ...

    @property
    def mtp_layers(self) -> nn.ModuleList:
        """One layer per depth; the head is the target's."""
        ...


class MTPTarget(TransformersLanguageModel):
    """The target as a `LanguageModel` that keeps the hidden states of its sequence."""

    def __init__(self, model: MTPModel) -> None:
        super().__init__(model.target)
        self.states: torch.Tensor | None = None
        """[N, H], the hidden states of all tokens in the cache after the last call."""

    def forward(self, query_token_ids: torch.Tensor, kv_cache: KVCache) -> torch.Tensor:
        """See `LanguageModel.forward`; batch size 1."""
        past, read = kv_cache.get_num_tokens(), []
        model: Any = self.model
        hook = model.get_output_embeddings().register_forward_pre_hook(
            lambda _, arguments: read.append(arguments[0][0])
        )
        try:
            logits = super().forward(query_token_ids.to(model.device), kv_cache)
        finally:
            hook.remove()
        self.states = read[0] if self.states is None else torch.cat([self.states[:past], read[0]])
        return logits


class MTPDrafter:
    """`Drafter` that uses the MTP layers.

    KV cache rows of accepted tokens are kept, rows of drafts are cropped, as in the target's cache.

    Args:
        model: the target and its MTP layers.
        target: runs before the drafter in each step and provides the hidden states.
        is_vanilla: use one layer per draft; else the first layer makes all drafts.
        chain: the hidden states of further layers (vanilla).
        role: noise for sampling drafts: `Role.TARGET` for `coupled`, `Role.DRAFT` for `rejection`,
            whose drafts must be independent of the target's noise; None: drafts are the argmax.
        vocab_ids: token ids that may be drafted; None: all.
    """

    def __init__(
        self,
        model: MTPModel,
        target: MTPTarget,
        *,
        is_vanilla: bool = False,
        chain: Chain = "output",
        role: Role | None = Role.TARGET,
        vocab_ids: Sequence[int] | None = None,
    ) -> None:
        self._layers, self._target, self._role = model.mtp_layers, target, role
        self._is_vanilla, self._chain = is_vanilla, chain
        self._vocab_ids = None if vocab_ids is None else torch.tensor(vocab_ids)
        self._embed: Any = model.target.get_input_embeddings()
        self._head: Any = model.target.get_output_embeddings()
        self._caches = [DynamicKVCache() for _ in (self._layers if is_vanilla else range(1))]

    def draft(self, rule: SamplingRule, output: Sequence[int], num_drafts: int) -> Draft:
        """See `Drafter.draft`; returns no drafts before the target has read the prompt.

        Raises:
            ConfigError: the model has too few MTP layers.
        """
        needed = num_drafts if self._is_vanilla else min(num_drafts, 1)
        expect(
            len(self._layers) >= needed,
            ConfigError,
            f"num_drafts: {num_drafts} need {needed} MTP layers, got {len(self._layers)}",
        )
        if self._target.states is None or num_drafts == 0:
            return Draft([])
        text = _Drafts(rule, output, self._role)
        make = self._of_many_layers if self._is_vanilla else self._of_one_layer
        make(text, num_drafts)
        return text.so_far

    def _of_one_layer(self, text: _Drafts, num_drafts: int) -> None:
        (cache,) = self._caches
        end = len(text.tokens) - 1
        rows = self._states(cache.get_num_tokens(), end)
        for _ in range(num_drafts):
            tokens = text.tokens[cache.get_num_tokens() + 1 :]
            rows = self._run(0, cache, tokens, rows)[-1:]
            if not text.add(self._logits(0, rows)):
                break
        cache.crop(cache.get_num_tokens() - end)

    def _of_many_layers(self, text: _Drafts, num_drafts: int) -> None:
        caches, end = self._caches[:num_drafts], len(text.tokens) - 1
        # the last N - 1 rows of layer N hold drafts
        start = max(0, min(cache.get_num_tokens() for cache in caches) - num_drafts + 1)
        rows = self._states(start, end)
        for depth, cache in enumerate(caches):
            cache.crop(cache.get_num_tokens() - start)
            made = self._run(depth, cache, text.tokens[start + depth + 1 :], rows)
            if not text.add(self._logits(depth, made[-1:])):
                break
            if self._chain == "output":
                rows = made
            elif self._chain == "target_shift":
                rows = torch.cat([rows[1:], made[-1:]])

    def _states(self, start: int, end: int) -> torch.Tensor:
        """Return the target's hidden states [N, H] of a range of tokens."""
        states = self._target.states
        num_read = 0 if states is None else len(states)
        if states is None or num_read < end:
            raise ConfigError(f"target: expected {end} tokens to have been read, got {num_read}")
        return states[start:end]

    @torch.no_grad()
    def _run(
        self, depth: int, cache: KVCache, tokens: Sequence[int], rows: torch.Tensor
    ) -> torch.Tensor:
        """Run a layer on tokens and hidden states that follow those in its cache -> [N, H]."""
        past = cache.get_num_tokens()
        positions = torch.arange(past, past + len(tokens), device=rows.device)
        made: torch.Tensor = self._layers[depth](
            embed_tokens=self._embed,
            input_ids=torch.tensor(tokens, device=rows.device),
            position_ids=positions.unsqueeze(0),
            hidden_states=rows,
            attn_metadata=_Attention(cache, self._mask(past, len(tokens))),
        )
        return made

    def _mask(self, past: int, num_rows: int) -> torch.Tensor | None:
        """Return the causal mask [1, 1, N, past + N], or None if the attention needs none."""
        config: Any = self._target.model.config
        if num_rows == 1 or (past == 0 and config._attn_implementation == CAUSAL_ATTENTION):
            return None
        shape, weight = (num_rows, past + num_rows), self._embed.weight
        mask = torch.full(shape, -torch.inf, dtype=weight.dtype, device=weight.device)
        return mask.triu(past + 1)[None, None]

    @torch.no_grad()
    def _logits(self, depth: int, row: torch.Tensor) -> torch.Tensor:
        """Return the logits [V] of a row [1, H] of the layer's output."""
        layer: Any = self._layers[depth]
        logits = usable(layer.shared_head(row, self._head, None, True)[0])
        if self._vocab_ids is None:
            return logits
        others = torch.full_like(logits, -torch.inf)
        return others.index_copy(0, self._vocab_ids, logits[self._vocab_ids])


class _Drafts:
    """A sequence and its drafts so far."""

    def __init__(self, rule: SamplingRule, output: Sequence[int], role: Role | None) -> None:
        self._rule, self._role, self._output = rule, role, list(output)
        self.tokens = [*rule.prompt, *output]
        self.so_far = Draft([], [] if role is Role.DRAFT else None)

    def add(self, row: torch.Tensor) -> bool:
        """Sample the next draft from a row [V]; return False if the row has no usable value."""
        rule, drafts = self._rule, self.so_far
        before = [*self._output, *drafts.token_ids]
        if self._role is None:
            token = rule.first(row, before)
        else:
            token = rule.choose(row, before, self._role)
        if token == NO_TOKEN:
            return False
        drafts.token_ids.append(token)
        self.tokens.append(token)
        if drafts.probabilities is not None:
            drafts.probabilities.append(rule.probabilities(row, before))
        return True


class _Attention:
    """Adapter from a `KVCache` to the cache interface of transformers' attention."""

    def __init__(self, cache: KVCache, mask: torch.Tensor | None) -> None:
        self._cache, self._mask = cache, mask

    def model_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for modules of transformers."""
        return {"past_key_values": self, "attention_mask": self._mask, "use_cache": True}

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> KVState:
        """Append keys and values of new rows; return those of all rows."""
        self._cache.update([KVState(keys, values)])
        return self._cache.get_kv_states()[0]
