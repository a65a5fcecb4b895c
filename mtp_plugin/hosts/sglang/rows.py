"""What engines with rows share, which is still part of the vLLM adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mtp_plugin.errors import RequestError
from mtp_plugin.hosts.vllm import options, request_slots, requests, row_ops, versions
from mtp_plugin.hosts.vllm.options import EngineSettings
from mtp_plugin.hosts.vllm.requests import RequestOptions
from mtp_plugin.hosts.vllm.row_ops import DraftRows, StepRows, valid_ids
from mtp_plugin.hosts.vllm.versions import INSTALLED, Reader
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.sampling import sample_tokens

__all__ = [
    "INSTALLED",
    "DraftRows",
    "EngineSettings",
    "Reader",
    "RequestOptions",
    "RequestSlots",
    "RowOps",
    "RowOptions",
    "SamplingFacts",
    "StepRows",
    "differences",
    "method_problems",
    "read_request",
]


class RowOptions(options.VllmOptions):
    """Options of one engine."""


@dataclass(frozen=True)
class SamplingFacts:
    """What the slot table holds of a request that its engine stops and masks."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    prompt_len: int
    all_stop_token_ids = frozenset[int]()
    stop_token_ids = ()
    ignore_eos = False
    min_tokens = 0


class RequestSlots(request_slots.RequestSlots):
    """Slots 1 to ``num_slots - 1`` belong to requests, slot 0 to the rows that pad a batch."""

    def __init__(self, num_slots: int, device: torch.device, settings: EngineSettings) -> None:
        super().__init__(num_slots - 1, device, settings)
        self.verified_by = np.zeros(num_slots, dtype=np.int32)
        self.has_draft_limit = np.zeros(num_slots, dtype=bool)


class RowOps(row_ops.RowOps):
    """Drafts come as columns of their logits."""

    _columns_of: torch.Tensor | None = None

    def set_draft_ids(self, ids: torch.Tensor) -> None:
        """Take the ids [V'] of the columns of draft logits."""
        self._draft_ids = ids.to(torch.int32)
        self._columns_of = torch.zeros(int(ids.max()) + 1, dtype=torch.int64, device=ids.device)
        self._columns_of[ids.to(torch.int64)] = torch.arange(len(ids), device=ids.device)

    def sample_drafts(self, draft: DraftRows) -> torch.Tensor:
        """Sample a draft per row [R]; returns columns of the logits, int64."""
        self._wait_for_kernels()
        rows = LogitRows.flat(draft.positions, draft.column)
        drafts = sample_tokens(
            draft.logits,
            rows,
            self.slots.of(draft.indices),
            vocab_ids=self._draft_ids,
            backend=self.backend,
        )
        drafts = valid_ids(drafts)
        return drafts if self._columns_of is None else self._columns_of[drafts]


def method_problems(name: str, method: str, settings: EngineSettings) -> list[str]:
    """Return why a verification method cannot be used, in one line or none."""
    if method in ("rejection", "block"):
        return [f"{name}: {method} is not served in SGLang yet: use coupled"]
    return requests.method_problems(name, method, settings)


def read_request(given: Mapping[str, Any] | None, settings: EngineSettings) -> RequestOptions:
    """Return the options of a request; raises RequestError."""
    problems = []
    wanted = (given or {}).get("mtp_verification")
    if wanted in ("rejection", "block"):
        problems = method_problems("mtp_verification", wanted, settings)
        given = {key: value for key, value in (given or {}).items() if key != "mtp_verification"}
    try:
        found = requests.read_request(given, settings)
    except RequestError as error:
        problems.append(str(error))
    if problems:
        raise RequestError(
            "; ".join(problems).replace("additional_config.mtp_plugin.", "MTP_PLUGIN_SGLANG: ")
        )
    return found


def differences(
    signatures: Mapping[str, Sequence[str]],
    names: Mapping[str, Sequence[str]],
    wrapped: frozenset[str],
    reader: Reader,
) -> list[str]:
    """Return one line for everything that is missing or differs."""
    found = []
    for target, parameters in signatures.items():
        given = reader.parameters(target)
        problem = versions.mismatch(target, tuple(parameters), reader)
        known = tuple(one.partition("=")[0] for one in (given or ())[: len(parameters)])
        if given is not None and target in wrapped and known == tuple(parameters):
            continue
        found.append(problem)
    found += [versions.missing_names(t, tuple(n), reader) for t, n in names.items()]
    return [problem for problem in found if problem is not None]
