from tests.hosts.embedded.test_draft_vocab import *  # noqa: F403
