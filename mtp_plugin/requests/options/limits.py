"""How much of something a request may ask for, and how little is nothing."""

GREEDY_BELOW = 1e-5
"""A temperature under it is greedy."""

MAX_BIAS_IDS = 1024
"""Ids that ``logit_bias`` of a request may name."""
MAX_BAD_WORDS = 64
MAX_BAD_WORD_LEN = 16
"""Bad words of a request, and tokens of each."""
MAX_LOGPROBS = 20
"""Most likely tokens that may be told beside each."""
MAX_RANGE = 2**20
"""Ids of a ``range``: more than any vocabulary has."""
