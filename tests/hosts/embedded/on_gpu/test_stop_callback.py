from tests.hosts.embedded.test_stop_callback import *  # noqa: F403
