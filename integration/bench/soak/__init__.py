"""Soak test: a long run of random traffic with checks of outputs, slots, blocks and memory."""
