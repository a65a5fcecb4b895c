"""Language models whose rows follow from the last two tokens, to the bit, however they are fed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mtp_plugin.errors import CheckpointError
from mtp_plugin.infer import Draft, KVCache, KVState, LanguageModel, Role, SamplingRule, Scorer


class TableModel:
    """Rows of a random table; keeps the tokens it saw as states.

    Args:
        like: a model of which this one is a version, as wrong as ``noise`` says.
    """

    def __init__(
        self,
        vocab_size: int = 12,
        *,
        seed: int = 0,
        like: TableModel | None = None,
        noise: float = 1.0,
    ) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.vocab_size = vocab_size if like is None else like.vocab_size
        shape = (self.vocab_size, self.vocab_size, self.vocab_size)
        self.rows = torch.randn(shape, generator=rng) * (2 if like is None else noise)
        if like is not None:
            self.rows += like.rows
        self.num_fed: list[int] = []

    @property
    def eos_token_id(self) -> int:
        raise CheckpointError("TableModel: expected an eos_token_id, got none")

    def forward(self, query_token_ids: torch.Tensor, kv_cache: KVCache) -> torch.Tensor:
        self.num_fed.append(query_token_ids.shape[1])
        states = query_token_ids[:, None, :, None].double()
        kv_cache.update([KVState(states, states)])
        tokens = kv_cache.get_kv_states()[0].keys[0, 0, :, 0].long()
        before = torch.cat([tokens.new_zeros(1), tokens[:-1]])
        return self.rows[before, tokens][-query_token_ids.shape[1] :].unsqueeze(0)


class LanguageModelDrafter:
    """A `Drafter` that uses another language model.

    Args:
        role: of the noise it draws with.
    """

    def __init__(self, model: LanguageModel, role: Role = Role.TARGET) -> None:
        self._scorer, self._role = Scorer(model), role

    def draft(self, rule: SamplingRule, output: Sequence[int], num_drafts: int) -> Draft:
        tokens = list(output)
        distributions: list[torch.Tensor] = []
        for _ in range(num_drafts):
            row = self._scorer.score([*rule.prompt, *tokens])[-1]
            distributions.append(rule.probabilities(row, tokens))
            tokens.append(rule.choose(row, tokens, self._role))
        return Draft(tokens[len(output) :], distributions)
