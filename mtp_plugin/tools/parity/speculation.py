"""Minimal speculative decoding of a loaded model, without the executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def speculate(model: LoadedModel, text: Continuation, drafting: Drafting) -> Speculated:
    """Decode a request with drafts of the model's MTP layers.

    The model must run under :func:`transformers_attention`.
    """
    target = MTPTarget(model)
    drafter = MTPDrafter(
        model,
        target,
        is_vanilla=drafting.is_vanilla,
        chain=drafting.chain,
        role=drafting.role,
        vocab_ids=drafting.vocab_ids,
    )
    return speculative_decode(
        target, drafter, text, num_drafts=drafting.num_drafts, verify=drafting.verify
    )
