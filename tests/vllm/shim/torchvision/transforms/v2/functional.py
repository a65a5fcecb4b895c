"""See `torchvision`."""

from torchvision._stub import __getattr__ as __getattr__
