"""Speculative token and KV bookkeeping for Megatron-Core, and its controller's interface.

``install()`` replaces four functions of Megatron's text generation controller, optionally also its
sampling, in the running process::

    from mtp_plugin.hosts import megatron

    print(megatron.install(sampling=True))
    megatron.uninstall()

``mtp_utils_pytorch`` (any device) and ``mtp_utils_triton`` (Triton, CUDA tensors) have the
functions of Megatron's modules of these names, with the same signatures, and in addition
``required_logit_indices``, for engines that import them.
"""

from mtp_plugin.hosts.megatron.installation import Status, install, status, uninstall

__all__ = ["Status", "install", "status", "uninstall"]
