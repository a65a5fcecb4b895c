"""Decoder layers with few kernel launches, for the modules of transformers.

transformers provides the classes, the weights and the behaviour. Run eagerly, its modules launch
about thirty small kernels per layer, which at a few rows take longer than reading the weights. A
dense layer here is: norm with the residual added, one product for queries, keys and values, head
norms and rotation in place, attention, a product, norm with the residual added, one product for
gate and up, the gated activation, a product. A mixture of experts is its router, one launch that
sorts pairs of rows and experts, two grouped products and a sum; nothing is read back from the
device. Weights that are read together are stored together, once, and the modules of transformers
keep views of them.

Products are torch's, that is cuBLAS. The kernels between them are small ones of this package:

- Liger-Kernel has norms with residuals, rotations and gated activations, made for training: they
  save statistics for a backward pass, copy the halves of a joint gate-and-up product to make them
  contiguous, take cosines and sines per call instead of a table by position, and have neither head
  norms nor the joined norms of an MTP layer. Its mixture of experts reads a count back from the
  device to size its grid, which a captured step cannot do.
- `torch.compile` makes good kernels of the same code, but takes seconds per function and shape at
  every cold start, and a captured step needs each shape once.

Modules are recognised by their code, not by their name (`recognise`); all others run as in
transformers.
"""
