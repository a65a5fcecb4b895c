"""Settings of the kernels that several files try."""

from __future__ import annotations

import pytest

from mtp_plugin.ops.sampling import sample_triton


@pytest.fixture(params=[1, 4], ids=["alone", "shared"])
def shares(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Number of programs that finish a row."""
    monkeypatch.setattr(sample_triton, "SHARES", request.param)
    return request.param
