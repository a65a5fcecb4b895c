from tests.hosts.embedded.test_properties import *  # noqa: F403
