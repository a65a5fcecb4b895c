from tests.executor.test_processed_logprobs import *  # noqa: F403
