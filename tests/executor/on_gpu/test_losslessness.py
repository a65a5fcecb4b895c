from tests.executor.test_losslessness import *  # noqa: F403
