from tests.hosts.embedded.test_sampling_scenarios import *  # noqa: F403
