"""Tensor operations of speculative decoding, each with a torch reference and Triton kernels."""
