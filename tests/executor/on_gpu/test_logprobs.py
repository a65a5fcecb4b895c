from tests.executor.test_logprobs import *  # noqa: F403
