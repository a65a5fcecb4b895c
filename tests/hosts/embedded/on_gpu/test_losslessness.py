from tests.hosts.embedded.test_losslessness import *  # noqa: F403
