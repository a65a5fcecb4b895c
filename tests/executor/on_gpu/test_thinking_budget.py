from tests.executor.test_thinking_budget import *  # noqa: F403
