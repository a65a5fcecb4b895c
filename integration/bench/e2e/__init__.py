"""Whole decoding, MTP on beside MTP off, with phases of a step; no figure without a match."""
