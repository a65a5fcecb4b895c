from tests.ops import triton_cpu as triton_cpu  # before the kernels
