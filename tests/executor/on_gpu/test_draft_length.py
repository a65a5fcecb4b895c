from tests.executor.test_draft_length import *  # noqa: F403
