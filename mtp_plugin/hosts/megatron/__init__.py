"""Drop-in modules under Megatron's own names, for its speculative token and KV bookkeeping.

``mtp_utils_pytorch`` runs anywhere; ``mtp_utils_triton`` needs Triton and CUDA tensors. Both have
the same functions: the four of Megatron's modules, with its signatures, and
``required_logit_indices`` and ``advance_decode_batch`` besides. An engine takes them up by
importing from here, or, unchanged, when they are put in place before its controller is imported::

    sys.modules[
        "megatron.core.inference.text_generation_controllers.mtp_utils_triton"
    ] = mtp_plugin.hosts.megatron.mtp_utils_triton
"""
