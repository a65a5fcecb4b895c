"""The table of what a request may ask for.

`SamplingParams` in `params` is the table: every field carries its range (`values`), what it stands
for where it changes nothing, its name in TensorRT-LLM's requests and, where kernels read it, its
column in the slot table (`option`). Admission, error texts, documentation and the slot table follow
from it. An option is served where a sampler, a verification mode or an op lists its name: see
``served_options``. `together` has what may stand beside each other, `spellings` how other engines
write the same, `host` what TensorRT-LLM's requests have beside it, `limits` how long lists may be.
"""

from mtp_plugin.requests.options.host import HOST_OPTIONS
from mtp_plugin.requests.options.limits import (
    GREEDY_BELOW,
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_BIAS_IDS,
    MAX_LOGPROBS,
    MAX_RANGE,
)
from mtp_plugin.requests.options.option import Option
from mtp_plugin.requests.options.params import (
    LOGPROBS_MODE,
    OPTIONS,
    SamplingParams,
    unserved,
)
from mtp_plugin.requests.options.spellings import NEUTRAL_ELSEWHERE, READ_BY_NOBODY, WRITTEN_HERE
from mtp_plugin.requests.options.together import DRAFTS_OF_VERIFICATION, is_greedy

__all__ = [
    "DRAFTS_OF_VERIFICATION",
    "GREEDY_BELOW",
    "HOST_OPTIONS",
    "LOGPROBS_MODE",
    "MAX_BAD_WORDS",
    "MAX_BAD_WORD_LEN",
    "MAX_BIAS_IDS",
    "MAX_LOGPROBS",
    "MAX_RANGE",
    "NEUTRAL_ELSEWHERE",
    "OPTIONS",
    "READ_BY_NOBODY",
    "WRITTEN_HERE",
    "Option",
    "SamplingParams",
    "is_greedy",
    "unserved",
]
