"""In place of torchvision, which vLLM's Qwen3.5 module imports for images."""

from torchvision._stub import __getattr__ as __getattr__

__version__ = "0.28.0"
