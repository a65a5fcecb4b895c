from tests.executor.test_request_options import *  # noqa: F403
