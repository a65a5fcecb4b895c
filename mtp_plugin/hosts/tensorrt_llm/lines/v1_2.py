"""API version 1.2: ``MTPSampler(nextn=)``; each worker class defines ``forward``.

Releases 1.0 and 1.1 have the same factory functions, but no ``draft_len_schedule``.
"""

from __future__ import annotations

from mtp_plugin.hosts.tensorrt_llm.adapter import Adapter
from mtp_plugin.hosts.tensorrt_llm.lines.shared import SHARED_NEEDS
from mtp_plugin.hosts.tensorrt_llm.seams import PACKAGE, PYEXECUTOR, SPECULATIVE, UTILS, Need


class Line12(Adapter):
    """Both workers share one metadata class; eagle has a manager only for relaxed acceptance."""

    line = "1.2"
    releases = "end of 1.2 and first 1.3 release candidates (early 2026)"
    needs = (
        *SHARED_NEEDS,
        Need(UTILS, "get_spec_metadata", ("is_draft_model",)),
        Need(UTILS, "get_spec_worker", ("spec_config", "model_config", "mapping")),
        Need(UTILS, "MTPSampler", ("nextn",)),
        Need(UTILS, "MTPSpecMetadata"),
        Need(f"{PACKAGE}.llmapi.llm_args", "MTPDecodingConfig", ("draft_len_schedule",)),
        Need(f"{SPECULATIVE}.interface", "SpecWorkerBase._forward_impl", absent=True),
        Need(f"{PYEXECUTOR}.sampler", "SampleState", ("scheduled_requests",)),
    )
    step_method = "forward"
    state_names = (
        (f"{SPECULATIVE}.mtp", "SampleStateMTP", "SampleStateTensorsMTP"),
        (f"{SPECULATIVE}.spec_sampler_base", "SampleStateSpec", "SampleStateTensorsSpec"),
    )
    state_requests = "scheduled_requests"
    greedy_key = False
    eagle_layer_kwargs = frozenset({"all_rank_num_tokens"})
