"""The table of request options.

Every field of `SamplingParams` (`params`) is a row (`option`): its range, its neutral value, its
names in TensorRT-LLM and other engines and, where kernels read it, its column in the slot table.
Admission, messages, documentation and the slot table follow from it. An option is served if a
sampler, a verification method or an op lists its name (``served_options``). Host engines check
values under their own names of options with `Option.problem`. `rules` has the values that exclude
each other, `spellings` the names and values of other engines.
"""

from mtp_plugin.requests.options.option import (
    GREEDY_BELOW,
    INT32_MAX,
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_BIAS_IDS,
    MAX_LOGPROBS,
    MAX_RANGE,
    Option,
)
from mtp_plugin.requests.options.params import (
    LOGPROBS_MODE,
    OPTIONS,
    SamplingParams,
    unserved,
)
from mtp_plugin.requests.options.rules import DRAFTS_OF_VERIFICATION, is_greedy
from mtp_plugin.requests.options.spellings import (
    HOST_OPTIONS,
    IGNORED_OPTIONS,
    RENAMED_OPTIONS,
    WORDS_OF_TYPES,
    ignored_problem,
)

__all__ = [
    "DRAFTS_OF_VERIFICATION",
    "GREEDY_BELOW",
    "HOST_OPTIONS",
    "IGNORED_OPTIONS",
    "INT32_MAX",
    "LOGPROBS_MODE",
    "MAX_BAD_WORDS",
    "MAX_BAD_WORD_LEN",
    "MAX_BIAS_IDS",
    "MAX_LOGPROBS",
    "MAX_RANGE",
    "OPTIONS",
    "RENAMED_OPTIONS",
    "WORDS_OF_TYPES",
    "Option",
    "SamplingParams",
    "ignored_problem",
    "is_greedy",
    "unserved",
]
