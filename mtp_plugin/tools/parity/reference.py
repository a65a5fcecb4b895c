"""The reference: a loaded model with the attention of transformers, without the executor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mtp_plugin.config import LLMConfig, MTPDecodingConfig
from mtp_plugin.config.draft_vocab import add_draft_ids, resolve_draft_vocab
from mtp_plugin.hosts.embedded.models import LoadedModel
from mtp_plugin.infer import (
    Continuation,
    MTPDrafter,
    MTPTarget,
    Role,
    Speculated,
    Thinking,
    coupled,
    rejection,
    speculative_decode,
)
from mtp_plugin.infer.mtp_head import Chain
from mtp_plugin.infer.speculation import Verify
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.speculative.host import DecodingOptions
from mtp_plugin.speculative.verification import label_of

TRANSFORMERS_ATTENTION = "sdpa"
"""The attention implementation of transformers that the reference uses."""


@contextmanager
def transformers_attention(model: LoadedModel) -> Iterator[None]:
    """Run the model with `TRANSFORMERS_ATTENTION`, and restore its own attention on exit."""
    former: Any = model.target.config._attn_implementation
    model.set_attn_implementation(TRANSFORMERS_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(former)


class Oracle:
    """The target model as the reference; it must run under :func:`transformers_attention`."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self.device: torch.device = next(model.lm_head.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights and logits."""
        return next(self._model.lm_head.parameters()).dtype

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], num_rows: int) -> torch.Tensor:
        """Return the logits [num_rows, V] float32 of the last ``num_rows`` tokens."""
        ids = torch.tensor([list(token_ids)], device=self.device)
        decoder: Any = self._model.target.get_decoder()
        states = decoder(input_ids=ids, use_cache=False).last_hidden_state[0, -num_rows:]
        # the unfused head, as in decoding
        head: Any = self._model.target.get_output_embeddings()
        logits: torch.Tensor = head(states)
        return logits.float()


_VERIFY: dict[str, Verify] = {"coupled": coupled, "rejection": rejection}
_ROLES = {"coupled": Role.TARGET, "plain": Role.DRAFT, "greedy": None}


@dataclass(frozen=True)
class Drafting:
    """Draft and verification settings that depend on nothing but the request."""

    num_drafts: int
    is_vanilla: bool
    chain: Chain
    role: Role | None
    verify: Verify
    vocab_ids: Sequence[int] | None

    @property
    def changes_output(self) -> bool:
        """Whether sampled output differs from non-speculative decoding."""
        return self.verify is not coupled

    @classmethod
    def of(
        cls,
        config: LLMConfig,
        model: LoadedModel,
        params: SamplingParams,
        thinking: Thinking | None = None,
    ) -> Drafting | str:
        """Return the executor's settings for a resolved config, or why they cannot be reproduced.

        Args:
            thinking: the tags, which a draft vocabulary always has.

        Raises:
            ConfigError: the draft vocabulary does not fit the model.
        """
        speculative = config.speculative_config
        if not isinstance(speculative, MTPDecodingConfig):
            return "no MTP layer drafts"
        label = label_of(
            DecodingOptions.read(speculative, defer_thinking_end=True), params.requested_options()
        )
        if label is not None:
            return f"{label.name} acceptance is not known without the executor"
        mtp, is_vanilla = speculative.mtp, speculative.use_mtp_vanilla
        chain = mtp.chain or model.traits.chain
        verification = params.verification or mtp.verifications[0]
        verify = coupled if params.is_greedy else _VERIFY.get(verification)
        if verify is None:
            return f"{verification} verification is not known without the executor"
        if (
            speculative.draft_len_schedule
            or speculative.max_concurrency
            or speculative.acceptance_window
            or mtp.adaptive_draft_len
        ):
            return "the number of drafts depends on more than the text"
        if is_vanilla and (chain == "target_shift" or mtp.draft_window != "exact"):
            return "what the MTP layers read depends on more than the text"
        vocab_size = model.facts.vocab_size
        ids = resolve_draft_vocab(mtp.draft_vocab, vocab_size)
        if ids is not None:
            tags = () if thinking is None else (thinking.begin, *thinking.end, thinking.end_token)
            always = (*model.facts.eos_token_ids, *(tag for tag in tags if tag is not None))
            ids = add_draft_ids(ids, always, vocab_size)
        return cls(
            num_drafts=speculative.draft_len,
            is_vanilla=is_vanilla,
            chain=chain,
            role=_ROLES[params.draft_sampling or mtp.drafts_of(verification)],
            verify=verify,
            vocab_ids=ids,
        )

    def decode(self, model: LoadedModel, text: Continuation) -> Speculated:
        """Decode a request; the model must run under :func:`transformers_attention`."""
        target = MTPTarget(model)
        drafter = MTPDrafter(
            model,
            target,
            is_vanilla=self.is_vanilla,
            chain=self.chain,
            role=self.role,
            vocab_ids=self.vocab_ids,
        )
        return speculative_decode(
            target, drafter, text, num_drafts=self.num_drafts, verify=self.verify
        )
