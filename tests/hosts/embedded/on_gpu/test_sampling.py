from tests.hosts.embedded.test_sampling import *  # noqa: F403
