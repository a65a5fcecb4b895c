"""See `torchvision`."""

from torchvision._stub import __getattr__ as __getattr__


class InterpolationMode:
    """Names that transformers maps."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
