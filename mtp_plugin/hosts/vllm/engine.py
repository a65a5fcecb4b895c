"""Sampling, verification and draft sampling of one vLLM engine."""

from __future__ import annotations

import logging
from typing import Any

import torch

from mtp_plugin.hosts.vllm.copied_tail import CopiedTail
from mtp_plugin.hosts.vllm.options import VllmSettings
from mtp_plugin.hosts.vllm.sampler import PluginSampler, PluginVerifier, draft_rows, dspark_rows
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.early_compile import CompileJob
from mtp_plugin.speculative.rows.request_slots import RequestSlots
from mtp_plugin.speculative.rows.row_ops import RowOps

_logger = logging.getLogger("vllm.mtp_plugin")


class Engine:
    """What replaces vLLM's sampler and verifier in one engine.

    Args:
        vllm_config: of the engine. settings: read from it. sampler: vLLM's, whose request states
            stay in use.
        precompilation: that the first launch waits for.
    """

    def __init__(
        self,
        vllm_config: Any,
        settings: VllmSettings,
        sampler: Any,
        device: torch.device,
        precompilation: CompileJob | None = None,
    ) -> None:
        spec = vllm_config.speculative_config
        slots = RequestSlots(vllm_config.scheduler_config.max_num_seqs, device, settings)
        backend = Backend.of(settings.options.kernels, device)
        vocab = vllm_config.model_config.get_vocab_size()
        self.ops = RowOps(slots, settings, backend, vocab)
        self.ops.precompilation = precompilation
        self.tail: CopiedTail | None = None
        if settings.options.tail is not None and spec is not None:
            length = settings.options.tail.ngram
            self.tail = CopiedTail(self.ops, sampler.req_states, length, vocab)
        self.sampler = PluginSampler(sampler, self.ops, self.tail)
        self.verifier = None if spec is None else PluginVerifier(self.sampler, spec, device)
        _logger.info(
            "mtp_plugin on: verification %(verification)s, %(drafts)s drafts per step, %(kernels)s "
            "kernels, drafter %(drafter)s, draft_len %(draft_len)s, tail %(tail)s, draft_vocab "
            "%(draft_vocab)s",
            {**settings.summary, "kernels": backend.value},
        )

    def sample_draft(self, speculator: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Sample the drafts of one pass, in place of ``DraftModelSpeculator.sample_draft``."""
        return self.ops.sample_drafts(draft_rows(speculator, *args, **kwargs))

    def sample_logits(self, speculator: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Sample one draft of every request, in place of ``DSparkSpeculator._sample_logits``."""
        return self.ops.sample_drafts(dspark_rows(speculator, *args, **kwargs))

    def restore(self) -> None:
        """Write what sleep of level 2 discards and no request writes again."""
        self.ops.restore()
        if self.tail is not None:
            self.tail.restore()
