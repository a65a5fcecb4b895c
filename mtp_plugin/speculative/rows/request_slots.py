"""The slot table of an engine: one row per slot index that the engine gives a request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mtp_plugin.config import MTPPluginOptions
from mtp_plugin.ops.sampling import DRAFT_COLUMNS, STEP_COLUMN
from mtp_plugin.ops.step import SlotRows
from mtp_plugin.requests.columns import Number, SlotColumn, TopPMass
from mtp_plugin.requests.options import INT32_MAX
from mtp_plugin.requests.seeds import seed_words
from mtp_plugin.requests.stopping import StopRule
from mtp_plugin.requests.thinking import NO_TOKEN
from mtp_plugin.speculative.host import DecodingOptions, RequestFacts
from mtp_plugin.speculative.rows.options import EngineSettings
from mtp_plugin.speculative.rows.request_options import RequestOptions, method_problems
from mtp_plugin.speculative.state.slot_table import SlotTable, SlotValues
from mtp_plugin.speculative.verification import DELTA_POOL, VerificationMode, make_modes
from mtp_plugin.verifications import codes, custom_codes

DRAFT_LIMIT = "draft_limit"
"""Column: most drafts of a step that may be accepted."""
_SEED_MASK = 2**64 - 1


class RequestSlots:
    """Request options and verification state on the device, as the modes of the engine read them.

    The table has a fixed address, as captured graphs need it. One row belongs to the rows that pad
    a batch: a greedy request.

    Args:
        max_num_reqs: number of further rows.
        padding: index of that row; None: the last one.
    """

    def __init__(
        self,
        max_num_reqs: int,
        device: torch.device,
        settings: EngineSettings,
        padding: int | None = None,
    ) -> None:
        self.settings = settings
        self._custom_codes = custom_codes()
        self.modes = engine_modes(settings, device)
        """Verification modes; replaced when a request names a method that was registered later."""
        columns = [column for mode in self.modes for column in mode.columns]
        # drafts are sampled by them, with modes that do not read them too
        columns = list(dict.fromkeys((*DRAFT_COLUMNS, STEP_COLUMN, *columns)))
        columns.append(SlotColumn(DRAFT_LIMIT, int, INT32_MAX))
        self._table = SlotTable(max_num_reqs + 1, columns, device)
        self.columns = self._table.columns
        self.table = self._table.rows
        """[S, W] int32, S = max_num_reqs + 1"""
        self.delta_in_force: torch.Tensor | None = None
        """[S] float32: the delta of relaxed acceptance that applies; None: there is none."""
        if DELTA_POOL in self.columns:
            self.delta_in_force = self._table.column(DELTA_POOL)
        self.verified_by = np.zeros(max_num_reqs + 1, dtype=np.int32)
        """[S] on the host: code of each request's verification method."""
        self.has_draft_limit = np.zeros(max_num_reqs + 1, dtype=bool)
        self._padding_row = max_num_reqs if padding is None else padding
        # a tensor: torch.where with a number would launch a fill first
        self._padding = torch.tensor(self._padding_row, dtype=torch.int32, device=device)
        self._staged: dict[int, list[int]] = {}
        self._num_requests = 0

    def values(
        self, facts: RequestFacts, options: RequestOptions, tokens: Sequence[int]
    ) -> dict[str, Number | Sequence[Number]]:
        """Return the columns of a request's row, without its seed.

        Args:
            facts: by `row_facts` of these options. tokens: ids of the prompt, and of the output so
                far if the request was preempted.
        """
        method = options.verification or self.settings.options.verification
        code = custom_codes().get(method)
        if code is not None and code != self._custom_codes.get(method):
            # registered since, or again
            self._custom_codes = custom_codes()
            self.modes = engine_modes(self.settings, self.table.device)
        values = facts.columns()
        for mode in self.modes:
            values.update(mode.slot_values(facts, tokens if mode.reads_tokens else ()))
        limit = options.draft_limit
        if limit is not None and limit < self.settings.num_drafts:
            values[DRAFT_LIMIT] = limit
        return values

    def stage(self, index: int, values: SlotValues, seed: int) -> None:
        """Overwrite the whole row of a request at the next `apply`.

        Args:
            values: by column. seed: of 64 bits, signed or not.

        Raises:
            MetadataError: there is no such column.
        """
        number = self._num_requests & 0x7FFFFFFF
        self._num_requests += 1
        words = seed_words(seed & _SEED_MASK, number)
        self._staged[index] = self.columns.row({**values, "seed": words, "number": number})
        self.verified_by[index] = values.get("verification", 0)
        self.has_draft_limit[index] = DRAFT_LIMIT in values

    def apply(self) -> None:
        """Write the staged rows; no synchronization."""
        if self._staged:
            self._table.write_rows(self._staged)
            self._staged = {}

    def restore(self) -> None:
        """Write the row of padding again."""
        self._table.write({self._padding_row: {}})
        self._padding.fill_(self._padding_row)

    def of(self, indices: torch.Tensor) -> SlotRows:
        """Return the slots of indices [N], all valid."""
        return self._table.rows_of(indices)

    def of_padded(self, indices: torch.Tensor) -> SlotRows:
        """Return the slots of indices [N], below 0 for padding, whose rows may hold NaN."""
        if self._padding_row == len(self.table) - 1:  # where an id outside the table is
            return self.of(indices)
        return self.of(torch.where(indices < 0, self._padding, indices))


def engine_modes(settings: EngineSettings, device: torch.device) -> tuple[VerificationMode, ...]:
    """Create the verification modes of an engine: of all methods that its requests may choose."""
    options, draft_len = settings.options, settings.num_drafts
    if settings.synthetic_rates is not None:
        mtp = MTPPluginOptions(
            verification="synthetic",
            synthetic_acceptance=tuple(map(float, settings.synthetic_rates)),
        )
        return make_modes(DecodingOptions(draft_len, mtp), device)
    names = [options.verification, *codes(), *custom_codes()]
    served = [name for name in dict.fromkeys(names) if not method_problems("", name, settings)]
    begin, end = options.thinking_begin_token, options.thinking_end_token
    return make_modes(
        DecodingOptions(
            draft_len,
            MTPPluginOptions(verification=tuple(served)),
            use_relaxed_acceptance_for_thinking=options.is_relaxed,
            relaxed_topk=options.relaxed_topk,
            relaxed_delta=options.relaxed_delta,
            thinking_tokens=(
                NO_TOKEN if begin is None else begin,
                NO_TOKEN if end is None else end,
            ),
        ),
        device,
    )


def row_facts(
    options: RequestOptions, stop_rule: StopRule, top_p_mass: TopPMass, **sampling: Number
) -> RequestFacts:
    """Return what the modes read of a request.

    Args:
        stop_rule: of it, end ids and the least number of tokens are read.
        top_p_mass: of the engine. sampling: temperature, top_k, top_p and min_p.
    """
    requested = {
        **sampling,
        "verification": options.verification,
        "relaxed_topk": options.relaxed_topk,
        "relaxed_delta": options.relaxed_delta,
    }
    given = {name: value for name, value in requested.items() if value is not None}
    return RequestFacts(0, stop_rule, options=given, top_p_mass=top_p_mass)
