"""Shared ground of all kernels."""
