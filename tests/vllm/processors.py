"""A custom logits processor of vLLM."""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor


class EvenWithoutRepeats(LogitsProcessor):
    """For requests with ``extra_args["even"]``: even token ids, none twice in a row."""

    def __init__(self, vllm_config, req_states):  # noqa: ARG002
        self.chosen = torch.zeros(req_states.max_num_reqs, dtype=torch.bool)

    def add_request(self, req_idx, sampling_params):
        self.chosen[req_idx] = bool((sampling_params.extra_args or {}).get("even"))
        return bool(self.chosen[req_idx])

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        rows = self.chosen[ctx.expanded_idx_mapping.long()].nonzero().squeeze(1)
        logits[rows, 1::2] = -torch.inf
        logits[rows, ctx.input_ids[rows].long()] = -torch.inf
        return logits
