"""Checks of the vLLM plugin under load; run them where vLLM is installed, on a GPU or a CPU."""
