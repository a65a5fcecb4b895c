from tests.executor.test_edits import *  # noqa: F403
