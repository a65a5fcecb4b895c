"""TensorRT-LLM as the adapters see it: its signatures, its behaviours, its loop."""
