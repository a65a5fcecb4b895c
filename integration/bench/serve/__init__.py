"""Throughput over HTTP compared with `LLM.generate`."""
