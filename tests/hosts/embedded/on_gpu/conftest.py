"""The executor's tests again, on the GPU: paged attention in Triton, steps in CUDA graphs.

The modules here are those of the folder above; only the harnesses differ. Oracles stay on the CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs a device."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def host() -> dict:
    """Every batch that only generates is padded to the next graph."""
    return {
        "device": "cuda",
        "dtype": "float32",
        "attn_backend": "auto",
        "cuda_graph_config": {
            "batch_sizes": [1, 8],
            "enable_padding": True,
            "capture": "all",
            "prompt_tokens": [],  # captured in test_prompt_graphs
        },
    }
