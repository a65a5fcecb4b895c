from tests.executor.test_relaxed import *  # noqa: F403
