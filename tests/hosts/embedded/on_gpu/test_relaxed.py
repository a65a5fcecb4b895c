from tests.hosts.embedded.test_relaxed import *  # noqa: F403
