from tests.executor.test_turn_down import *  # noqa: F403
