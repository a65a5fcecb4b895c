from tests.executor.test_residual import *  # noqa: F403
