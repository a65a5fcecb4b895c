from tests.hosts.embedded.test_processed_logprobs import *  # noqa: F403
