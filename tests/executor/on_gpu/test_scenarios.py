from tests.executor.test_scenarios import *  # noqa: F403
