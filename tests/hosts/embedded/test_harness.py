"""Each test gets the harness of its own host, whatever ran before it."""

from __future__ import annotations

import pytest


def test_harness_uses_the_device_of_its_host(harness, looping_harness, mla_harness, target, host):
    for each in (harness, looping_harness, mla_harness):
        assert each.host == host
    assert target is harness.target


class TestElsewhere:
    """As in ``on_gpu``, where another fixture of that name comes first."""

    @pytest.fixture
    def host(self):
        return {"device": "cpu", "max_batch_size": 2}

    def test_harness_uses_the_device_of_its_host(self, harness, looping_harness, mla_harness, host):
        for each in (harness, looping_harness, mla_harness):
            assert each.host == host
            assert each.llm(max_seq_len=64).config.max_batch_size == 2


def test_harness_is_made_once(harnesses, harness, host):
    assert harnesses("echo", dict(host)) is harness
