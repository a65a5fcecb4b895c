"""Needs that several API versions have in common."""

from __future__ import annotations

from mtp_plugin.hosts.tensorrt_llm.seams import PYEXECUTOR, SPECULATIVE, UTILS, Need

SHARED_NEEDS = (
    Need(UTILS, "get_spec_resource_manager", ("model_engine",)),
    Need(
        UTILS,
        "get_spec_metadata",
        ("spec_config", "model_config", "max_num_requests", "spec_resource_manager"),
    ),
    Need(UTILS, "get_spec_decoder", ("sampler_args", "spec_config")),
    Need(UTILS, "get_spec_worker", ("spec_config", "model_config", "mapping")),
    Need(f"{PYEXECUTOR}.resource_manager", "BaseResourceManager"),
    Need(f"{PYEXECUTOR}.sampler", "Sampler"),
)

NEEDS_OF_1_3 = (
    *SHARED_NEEDS,
    Need(UTILS, "get_spec_metadata", ("max_seq_len", "num_seq_slots")),
    Need(UTILS, "get_spec_worker", ("use_separate_draft_kv_cache",)),
    Need(UTILS, "Eagle3OneModelSpecMetadata"),
    Need(UTILS, "MTPSpecMetadata"),
    Need(f"{SPECULATIVE}.interface", "SpecWorkerBase._forward_impl"),
    Need(f"{SPECULATIVE}.spec_sampler_base", "SampleStateSpec", ("requests",)),
    Need(f"{SPECULATIVE}.spec_sampler_base", "SampleStateTensorsSpec"),
)
