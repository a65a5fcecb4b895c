from tests.hosts.embedded.test_draft_length import *  # noqa: F403
