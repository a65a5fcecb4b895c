from tests.executor.test_draft_exactness import *  # noqa: F403
