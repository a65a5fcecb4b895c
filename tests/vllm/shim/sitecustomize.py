"""Add a stub CPU backend to Triton: vLLM's V2 model runner needs one, and the interpreter runs."""

import types


class _Driver:
    @staticmethod
    def is_active():
        return True

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 32)

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_device_interface(self):
        import torch

        return torch.cpu


try:
    from triton.backends import backends
except ImportError:  # an interpreter without Triton, such as pip's own
    pass
else:
    backends["cpu"] = types.SimpleNamespace(driver=_Driver, compiler=None)
