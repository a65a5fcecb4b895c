"""Small random targets for the tests of `mtp_plugin.infer`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from integration.random_models import write_random_checkpoint
from mtp_plugin.hosts.embedded.models import load_model


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PreTrainedModel]:
    """A transformers model by family; `deepseek_v3` has latent attention."""
    loaded: dict[str, PreTrainedModel] = {}

    def load(family: str) -> PreTrainedModel:
        if family not in loaded:
            path = write_random_checkpoint(tmp_path_factory.mktemp(family), family)
            loaded[family] = load_model(path, num_mtp_layers=0).target
        return loaded[family]

    return load
