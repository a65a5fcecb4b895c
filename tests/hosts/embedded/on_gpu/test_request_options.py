from tests.hosts.embedded.test_request_options import *  # noqa: F403
