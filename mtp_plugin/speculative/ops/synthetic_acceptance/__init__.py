"""Request and position -> how many drafts draws accept, whatever the target thinks of them."""

from mtp_plugin.speculative.ops.synthetic_acceptance.contract import SyntheticRule, synthetic_rule
from mtp_plugin.speculative.ops.synthetic_acceptance.door import forced_matches

__all__ = ["SyntheticRule", "forced_matches", "synthetic_rule"]
