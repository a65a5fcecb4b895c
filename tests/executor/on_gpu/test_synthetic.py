from tests.executor.test_synthetic import *  # noqa: F403
