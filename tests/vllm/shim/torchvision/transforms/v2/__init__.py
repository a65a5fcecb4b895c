"""See `torchvision`."""

from torchvision._stub import __getattr__ as __getattr__
from torchvision.transforms.v2 import functional as functional
