"""API version 1.3a, before the common sampler: ``_forward_impl`` and ``MTPSampler(nextn=)``."""

from __future__ import annotations

from mtp_plugin.hosts.tensorrt_llm.adapter import Adapter
from mtp_plugin.hosts.tensorrt_llm.lines.shared import NEEDS_OF_1_3
from mtp_plugin.hosts.tensorrt_llm.seams import SPECULATIVE, UTILS, Need


class Line13a(Adapter):
    """Eagle shares metadata and resource manager with Eagle3."""

    line = "1.3a"
    releases = "1.3 release candidates before SpecSampler (tags unknown)"
    needs = (
        *NEEDS_OF_1_3,
        Need(UTILS, "MTPSampler", ("nextn",)),
        Need(UTILS, "Eagle3OneModelSampler"),
    )
    step_method = "_forward_impl"
    state_names = (
        (f"{SPECULATIVE}.spec_sampler_base", "SampleStateSpec", "SampleStateTensorsSpec"),
    )
    state_requests = "requests"
    greedy_key = True
    eagle_layer_kwargs = frozenset({"all_rank_num_tokens", "spec_metadata"})
