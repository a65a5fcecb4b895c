from tests.hosts.embedded.test_edits import *  # noqa: F403
