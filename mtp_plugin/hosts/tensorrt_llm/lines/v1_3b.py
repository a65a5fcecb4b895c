"""API version 1.3b, the newest: one ``SpecSampler`` for all one-engine speculation modes."""

from __future__ import annotations

from mtp_plugin.hosts.tensorrt_llm.adapter import Adapter
from mtp_plugin.hosts.tensorrt_llm.lines.shared import NEEDS_OF_1_3
from mtp_plugin.hosts.tensorrt_llm.seams import SPECULATIVE, UTILS, Need


class Line13b(Adapter):
    """Like 1.3a, without one sampler class per mode."""

    line = "1.3b"
    releases = "1.3.0rc1x to 1.3.0rc2x and later (since mid 2026)"
    needs = (
        *NEEDS_OF_1_3,
        Need(UTILS, "SpecSampler", ("accepted_path_len", "enable_penalty", "penalty_supported")),
        Need(UTILS, "MTPSampler", absent=True),
    )
    step_method = "_forward_impl"
    state_names = (
        (f"{SPECULATIVE}.spec_sampler_base", "SampleStateSpec", "SampleStateTensorsSpec"),
    )
    state_requests = "requests"
    greedy_key = True
    eagle_layer_kwargs = frozenset({"all_rank_num_tokens", "spec_metadata"})
