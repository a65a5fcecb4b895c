from tests.executor.test_properties import *  # noqa: F403
