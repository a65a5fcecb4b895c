from tests.hosts.embedded.test_logprobs import *  # noqa: F403
