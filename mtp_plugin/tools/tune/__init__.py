"""``mtp-plugin tune``: which K, verification method and draft vocabulary, or no drafts at all."""
