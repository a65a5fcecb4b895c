from tests.executor.test_stop_callback import *  # noqa: F403
