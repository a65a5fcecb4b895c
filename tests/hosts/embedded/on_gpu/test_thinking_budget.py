from tests.hosts.embedded.test_thinking_budget import *  # noqa: F403
