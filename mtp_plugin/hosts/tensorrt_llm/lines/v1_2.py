"""TensorRT-LLM 1.2: ``MTPSampler(nextn=)``; workers have a ``forward`` of their own.

1.0 and 1.1 have the same dispatchers; their configs know no ``draft_len_schedule``.
"""

from __future__ import annotations

from mtp_plugin.hosts.tensorrt_llm.adapter import Adapter
from mtp_plugin.hosts.tensorrt_llm.lines.shared import SHARED_NEEDS
from mtp_plugin.hosts.tensorrt_llm.seams import PACKAGE, PYEXECUTOR, SPECULATIVE, UTILS, Need


class Line12(Adapter):
    """One metadata class for both workers; a manager of eagle only where acceptance is relaxed."""

    line = "1.2"
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
