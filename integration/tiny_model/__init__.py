"""A small trained language model with three MTP heads, and the scripts that made it."""
