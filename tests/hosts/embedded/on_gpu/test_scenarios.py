from tests.hosts.embedded.test_scenarios import *  # noqa: F403
