from tests.executor.test_sampling import *  # noqa: F403
