"""Rows of logits with request slots and positions: sampling, verification and drafts of engines
that keep their own scheduler and metadata, in place of worker and sampler.

A request is read into a row of the slot table once; every step reads it there.
"""
