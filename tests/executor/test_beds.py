"""Each test gets the bed of its own host, whatever ran before it."""

from __future__ import annotations

import pytest


def test_a_bed_is_of_the_hosts_device(bed, looping_bed, mla_bed, target, host):
    for each in (bed, looping_bed, mla_bed):
        assert each.host == host
    assert target is bed.target


class TestElsewhere:
    """As in ``on_gpu``, where another fixture of that name comes first."""

    @pytest.fixture
    def host(self):
        return {"device": "cpu", "max_batch_size": 2}

    def test_a_bed_is_of_the_hosts_device(self, bed, looping_bed, mla_bed, host):
        for each in (bed, looping_bed, mla_bed):
            assert each.host == host
            assert each.llm(max_seq_len=64).config.max_batch_size == 2


def test_a_bed_is_made_once(beds, bed, host):
    assert beds("echo", dict(host)) is bed
