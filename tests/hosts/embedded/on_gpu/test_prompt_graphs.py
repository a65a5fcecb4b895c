"""The tests of graphs with prompts, with real graphs."""

from tests.hosts.embedded.test_prompt_graphs import *  # noqa: F403
