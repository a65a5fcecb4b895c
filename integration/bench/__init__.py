"""Benchmarks of kernels, steps and whole decoding; results are reported only after a match."""
