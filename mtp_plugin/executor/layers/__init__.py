"""Decoder layers in few launches, on top of transformers' modules.

transformers gives the classes, the weights and the behaviour. Run eagerly, its modules launch some
thirty small kernels per layer, which at a few rows take longer than reading the weights does. Here
a dense layer is: norm with the residual added, one product for queries, keys and values, head norms
and rotation in place, attention, a product, norm with the residual added, one product for gate and
up, the gated activation, a product. A mixture of experts is its router, one launch that sorts pairs
of rows and experts, two grouped products and a sum; nothing waits for the device. Weights that are
read together are stored together, once, and transformers' modules keep views of them.

Products are torch's, that is cuBLAS. The kernels between them are small ones of this package:

- Liger-Kernel has norms with residuals, rotations and gated activations, made for training: they
  save statistics for a backward pass, copy the halves of a joint gate-and-up product to make them
  contiguous, take cosines and sines per call instead of a table by position, and leave head norms
  and the joined norms of an MTP layer aside. Its mixture of experts reads a count back from the
  device to size its grid, which a captured step cannot do.
- `torch.compile` makes good kernels of the same pieces, and takes seconds per piece and shape for
  it at every cold start, while a captured step needs each shape once.

What is fused is recognised by its code, not by its name (`recognise`); everything else runs as
transformers runs it.
"""

from __future__ import annotations

from mtp_plugin.executor.layers.fused_model import FusedModel, FusedMTPLayer, FusionReport, fuse

__all__ = ["FusedMTPLayer", "FusedModel", "FusionReport", "fuse"]
