from tests.hosts.embedded.test_residual import *  # noqa: F403
