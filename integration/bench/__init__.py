"""Benchmarks that give no figure for a result that differs from the reference."""
