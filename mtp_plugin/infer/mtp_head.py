"""Drafts by the layers that a model was trained with for them, at their plainest.

Such a layer reads the state that the target had over each token, beside the token that follows it,
and says what comes behind that: over ``p q r s`` with ``t`` emitted it reads ``q r s t`` and drafts
``u``. The next draft comes of a layer of its own, which reads what the first made of these rows
beside the tokens one further on, ``r s t u`` (vanilla), or of the same layer, which reads what it
made of its last row beside its draft ``u``, one row further (eagle).
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
"""The states that a further layer reads: what the one before made of its rows; the target's moved
on by one, behind them the last that the one before made; the target's."""

CAUSAL_ATTENTION = "sdpa"
"""The attention of transformers by which rows without a mask see what is before them alone, where
nothing is cached."""


class MTPModel(Protocol):
    """A target and the layers that draft for it, in eval mode and without gradients."""

    @property
    def target(self) -> PreTrainedModel:
        """A causal language model."""
        ...

    @property
    def mtp_layers(self) -> nn.ModuleList:
        """A layer per depth; its head is the target's."""
        ...


class MTPTarget(TransformersLanguageModel):
    """The target as a language model that keeps its states of the one text that it reads."""

    def __init__(self, model: MTPModel) -> None:
        super().__init__(model.target)
        self.states: torch.Tensor | None = None
        """[N, H], of all tokens that were read and not forgotten by the last call."""

    def forward(self, query_token_ids: torch.Tensor, kv_cache: KVCache) -> torch.Tensor:
        """See `LanguageModel.forward`; of one text."""
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
    """The layers as a `Drafter`.

    What they made of tokens that stand is kept, and what they made of their own drafts is cropped,
    as the target forgets drafts that did not stand.

    Args:
        model: the target and its layers.
        target: reads the text; the drafter must be asked behind it.
        is_vanilla: a layer per draft; else the first drafts everything.
        chain: of vanilla.
        role: of the noise that drafts are drawn with: the target's for `coupled`, `Role.DRAFT` for
            `rejection`, which must not know what the target will draw; None: the first choice of
            the layer's logits, drawn or not.
        vocab_ids: that may be drafted; None: all.
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
        """As `Drafter.draft`; nothing before the target has read the prompt.

        Raises:
            ConfigError: fewer layers than drafts need.
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
        # the last of N layers read N - 1 drafts in its last rows
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
        """The target's of some tokens [N, H]."""
        states = self._target.states
        num_read = 0 if states is None else len(states)
        if states is None or num_read < end:
            raise ConfigError(f"target: expected {end} tokens to have been read, got {num_read}")
        return states[start:end]

    @torch.no_grad()
    def _run(
        self, depth: int, cache: KVCache, tokens: Sequence[int], rows: torch.Tensor
    ) -> torch.Tensor:
        """What a layer makes [N, H] of tokens and states that follow what the cache holds."""
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
        """Added to scores [1, 1, N, past + N], so that new rows see themselves and what is before
        them; None: the attention sees to that."""
        config: Any = self._target.model.config
        if num_rows == 1 or (past == 0 and config._attn_implementation == CAUSAL_ATTENTION):
            return None
        shape, weight = (num_rows, past + num_rows), self._embed.weight
        mask = torch.full(shape, -torch.inf, dtype=weight.dtype, device=weight.device)
        return mask.triu(past + 1)[None, None]

    @torch.no_grad()
    def _logits(self, depth: int, row: torch.Tensor) -> torch.Tensor:
        """[V] of what the layer made of a row [1, H]."""
        layer: Any = self._layers[depth]
        logits = usable(layer.shared_head(row, self._head, None, True)[0])
        if self._vocab_ids is None:
            return logits
        others = torch.full_like(logits, -torch.inf)
        return others.index_copy(0, self._vocab_ids, logits[self._vocab_ids])


class _Drafts:
    """A text, and its drafts so far."""

    def __init__(self, rule: SamplingRule, output: Sequence[int], role: Role | None) -> None:
        self._rule, self._role, self._output = rule, role, list(output)
        self.tokens = [*rule.prompt, *output]
        self.so_far = Draft([], [] if role is Role.DRAFT else None)

    def add(self, row: torch.Tensor) -> bool:
        """Draw the next draft of a row [V]; whether there was one."""
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
    """A layer's cache as its attention asks for it."""

    def __init__(self, cache: KVCache, mask: torch.Tensor | None) -> None:
        self._cache, self._mask = cache, mask

    def model_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for modules of transformers."""
        return {"past_key_values": self, "attention_mask": self._mask, "use_cache": True}

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> KVState:
        """Those of new rows -> those of all rows."""
        self._cache.update([KVState(keys, values)])
        return self._cache.get_kv_states()[0]
