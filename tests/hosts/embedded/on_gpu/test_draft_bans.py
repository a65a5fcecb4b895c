from tests.hosts.embedded.test_draft_bans import *  # noqa: F403
