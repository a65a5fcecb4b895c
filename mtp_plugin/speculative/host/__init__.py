"""Typed views of a host engine's objects; fields that only some engines have get defaults here.

A host engine is the serving engine that runs the plugin. Its config is read once, a request when it
is assigned a slot, and metadata once per step; the rest of the plugin uses only the typed results.

Names are imported lazily, so that an engine with metadata of its own, as vLLM, loads what it uses.
"""

from typing import TYPE_CHECKING

from mtp_plugin.lazy_imports import lazy_names

if TYPE_CHECKING:
    from mtp_plugin.speculative.host.config import *  # noqa: F403
    from mtp_plugin.speculative.host.draft_model import *  # noqa: F403
    from mtp_plugin.speculative.host.manager import *  # noqa: F403
    from mtp_plugin.speculative.host.plain import *  # noqa: F403
    from mtp_plugin.speculative.host.protocols import *  # noqa: F403
    from mtp_plugin.speculative.host.ranks import *  # noqa: F403
    from mtp_plugin.speculative.host.request import *  # noqa: F403
    from mtp_plugin.speculative.host.step import *  # noqa: F403

_NAMES = {
    "config": "DecodingOptions SamplerSizes num_ranks read_reasons refuse_unserved",
    "draft_model": "accepted_by is_eagle is_vanilla own_vocabulary part_of takes_output_rows",
    "manager": "STATES_POOL TOKENS_POOL manager_device manager_slot pool_of",
    "plain": "LOOP_OPTIONS PlainAttentionMetadata PlainBatch PlainRequest",
    "protocols": "AttentionMetadata DraftLayer ResourceManager Sampler ScheduledBatch SpecRequest",
    "ranks": "RankRows Ranks unserved_ranks",
    "request": "UNBOUNDED RequestFacts StepStats append_logprobs ends_prompt epoch_of facts_of "
    "has_finished may_speculate needs_sampling num_drafted_of num_listed_chunks own_facts phase_of "
    "read_request refusal_of refuse set_num_verified slot_of take_back_tokens token_after_chunk",
    "step": "HostStep cached_tokens expect_distinct_ids read_layout read_num_seqs read_positions "
    "read_step_draft_len sampling_kind_of",
}

if not TYPE_CHECKING:  # a checker reads the imports above
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)
