"""Drafts judged by the odds of their draw: what rejection and block verification ask of the device.

Drafts of a request are drawn on their own, what they were drawn from is kept, and the target's
distribution then says how far they stand and what follows them.
"""

from mtp_plugin.speculative.ops.sampling.residual.contract import Judgement
from mtp_plugin.speculative.ops.sampling.residual.door import judge, keep_draft_probs

__all__ = ["Judgement", "judge", "keep_draft_probs"]
