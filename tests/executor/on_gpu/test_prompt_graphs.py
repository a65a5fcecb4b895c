"""The tests of graphs with prompts, with real graphs."""

from tests.executor.test_prompt_graphs import *  # noqa: F403
