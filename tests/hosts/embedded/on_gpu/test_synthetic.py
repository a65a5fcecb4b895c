from tests.hosts.embedded.test_synthetic import *  # noqa: F403
