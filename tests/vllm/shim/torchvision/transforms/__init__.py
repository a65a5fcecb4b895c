"""See `torchvision`."""

from torchvision._stub import __getattr__ as __getattr__
from torchvision.transforms import functional as functional
from torchvision.transforms import v2 as v2
from torchvision.transforms.functional import InterpolationMode as InterpolationMode
