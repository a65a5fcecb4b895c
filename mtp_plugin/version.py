"""The version of the package, which the build, adapters and metrics read."""

__version__ = "0.1.0"
