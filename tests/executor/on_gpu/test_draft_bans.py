from tests.executor.test_draft_bans import *  # noqa: F403
