"""The border to a host: what only some hosts have is read here, with a default.

The options of a config are read once, a request when it gets its slot, metadata once a step. Behind
the border everything is typed.
"""

from mtp_plugin.speculative.host.config import (
    DecodingOptions,
    SamplerSizes,
    num_ranks,
    read_reasons,
    refuse_unserved,
)
from mtp_plugin.speculative.host.protocols import (
    AttentionMetadata,
    DraftLayer,
    ResourceManager,
    Sampler,
    ScheduledBatch,
    SpecRequest,
)
from mtp_plugin.speculative.host.ranks import RankRows, Ranks, unserved_ranks
from mtp_plugin.speculative.host.request import (
    UNBOUNDED,
    RequestFacts,
    StepStats,
    ends_prompt,
    epoch_of,
    facts_of,
    has_finished,
    may_speculate,
    num_drafted_of,
    own_facts,
    phase_of,
    read_request,
    take_back_tokens,
    tell_logprobs,
)
from mtp_plugin.speculative.host.step import (
    HostStep,
    cached_tokens,
    is_eagle,
    is_vanilla,
    own_vocabulary,
    part_of,
    read_layout,
    read_step_draft_len,
    takes_output_rows,
)

__all__ = [
    "UNBOUNDED",
    "AttentionMetadata",
    "DecodingOptions",
    "DraftLayer",
    "HostStep",
    "RankRows",
    "Ranks",
    "RequestFacts",
    "ResourceManager",
    "Sampler",
    "SamplerSizes",
    "ScheduledBatch",
    "SpecRequest",
    "StepStats",
    "cached_tokens",
    "ends_prompt",
    "epoch_of",
    "facts_of",
    "has_finished",
    "is_eagle",
    "is_vanilla",
    "may_speculate",
    "num_drafted_of",
    "num_ranks",
    "own_facts",
    "own_vocabulary",
    "part_of",
    "phase_of",
    "read_layout",
    "read_reasons",
    "read_request",
    "read_step_draft_len",
    "refuse_unserved",
    "take_back_tokens",
    "takes_output_rows",
    "tell_logprobs",
    "unserved_ranks",
]
