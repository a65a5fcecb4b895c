"""Whole decoding with and without MTP, and the phases of a step."""
