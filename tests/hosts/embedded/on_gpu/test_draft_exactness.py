from tests.hosts.embedded.test_draft_exactness import *  # noqa: F403
