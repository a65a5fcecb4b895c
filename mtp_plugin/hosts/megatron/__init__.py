"""Drop-in modules with Megatron-Core's names for speculative token and KV bookkeeping.

``mtp_utils_pytorch`` runs on any device; ``mtp_utils_triton`` needs Triton and CUDA tensors. Both
have the four functions of Megatron's modules, with the same signatures, and in addition
``required_logit_indices`` and ``advance_decode_batch``. An engine can import the functions from
here. Megatron itself uses them, without a change, if a module replaces its own before Megatron's
controller is imported::

    import sys
    from mtp_plugin.hosts.megatron import mtp_utils_triton

    package = "megatron.core.inference.text_generation_controllers"
    sys.modules[f"{package}.mtp_utils_triton"] = mtp_utils_triton
"""
