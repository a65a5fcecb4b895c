from tests.executor.test_draft_vocab import *  # noqa: F403
