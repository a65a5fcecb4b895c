"""Tests inside vLLM; ``make test-vllm`` runs them in an environment of their own."""
