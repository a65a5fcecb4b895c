"""A small model that thinks before it answers, for relaxed acceptance."""
