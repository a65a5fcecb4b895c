from tests.executor.test_sampling_scenarios import *  # noqa: F403
