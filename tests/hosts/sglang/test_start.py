"""Options, configurations, ranks and versions, without SGLang; ``tests/sglang`` has its classes."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from integration.sglang import signatures
from mtp_plugin.errors import ConfigError, HostError
from mtp_plugin.hosts.sglang import engine_checks, hooks, versions
from mtp_plugin.hosts.sglang.engine_checks import checked_settings, expect_equal_ranks
from mtp_plugin.hosts.sglang.versions import SERVED, problems_of
from mtp_plugin.speculative.host.signatures import body_hash


def arguments(**fields):
    """What the checks read of SGLang's ``ServerArgs``, with its defaults."""
    given = dict.fromkeys((*engine_checks._WRONG, *engine_checks._WRONG_WITH_DRAFTS))
    given |= {"device": "cuda", "sampling_backend": "flashinfer", "disaggregation_mode": "null"}
    given |= {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3}
    given |= {"speculative_num_draft_tokens": None, "speculative_eagle_topk": 1}
    given |= {"speculative_accept_threshold_single": 1.0}
    return SimpleNamespace(**{**given, **fields})


def settings(text="{}", **fields):
    return checked_settings(arguments(**fields), {"MTP_PLUGIN_SGLANG": text})


def test_unset_imports_and_registers_nothing() -> None:
    code = (
        "import sys; from mtp_plugin.hosts.sglang import register; register(); "
        "print([n for n in sys.modules if n.startswith('mtp_plugin.hosts.sglang.') or n in "
        "('torch', 'sglang', 'pydantic')])"
    )
    environment = {k: v for k, v in os.environ.items() if k != "MTP_PLUGIN_SGLANG"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


def test_options_come_as_json_or_from_a_file(tmp_path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("relaxed_topk: 4\nthinking_begin_token: 5\nthinking_end_token: 6\n")
    text = '{"relaxed_topk": 4, "thinking_begin_token": 5, "thinking_end_token": 6}'
    assert settings(text) == settings(str(file))
    assert settings(text).options.relaxed_topk == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"verificatoin": 1}', "MTP_PLUGIN_SGLANG: verificatoin: unknown option; known ones are"),
        ('{"relaxed_topk": 0}', "MTP_PLUGIN_SGLANG: relaxed_topk: "),
        ("nowhere.yaml", "MTP_PLUGIN_SGLANG: nowhere.yaml"),
        ("{", "MTP_PLUGIN_SGLANG: line 1"),
        ('{"verification": "block"}', "verification: block is not served in SGLang yet"),
        ('{"verification": "x"}', "verification: expected one of"),
        ('{"relaxed_topk": 4}', "relaxed acceptance needs thinking_begin_token and"),
        ('{"a\\u001b[31m": 1}', r"MTP_PLUGIN_SGLANG: 'a\x1b[31m': unknown option"),
        ('{"' + "a" * 999 + '": 1}', f"{'a' * 200}...: unknown option"),
        ('{"verification": "' + "a" * 2**20 + '"}', "SGLANG: expected at most 1048576 characters"),
        ("no\x1bwhere", r"MTP_PLUGIN_SGLANG: 'no\x1bwhere': no such file"),
        (
            '{"thinking_begin_token": 5, "thinking_end_token": 5}',
            "thinking_begin_token and thinking_end_token must differ, both are 5",
        ),
    ],
)
def test_wrong_options_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        settings(text)


def test_drafts_are_read_from_the_configuration() -> None:
    assert settings().num_drafts == 3
    assert settings(speculative_algorithm=None, speculative_eagle_topk=None).num_drafts == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("speculative_eagle_topk", 2),
        ("pp_size", 4),
        ("elastic_ep_backend", "nixl"),
        ("speculative_skip_dp_mlp_sync", True),
        ("speculative_num_draft_tokens", 5),
        ("enable_watermark", True),
        ("speculative_use_block_verification", True),
        ("sampling_backend", "intel_xpu"),
    ],
)
def test_wrong_configurations_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} is {value!r}: "):
        settings(**{name: value})


class TestRanks:
    @pytest.fixture(autouse=True)
    def store(self, monkeypatch: pytest.MonkeyPatch):
        store = dist.HashStore()
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
        monkeypatch.setattr(engine_checks, "_RANK_SECONDS", 0.1)
        return store

    def rank(self, rank: int):
        return SimpleNamespace(world_size=2, rank=rank, ranks=[0, 1])

    def test_equal_options_pass(self, store) -> None:
        store.set("mtp_plugin/1", engine_checks.fingerprint(settings(), 3))
        expect_equal_ranks(self.rank(0), settings(), 3)

    @pytest.mark.parametrize(
        ("text", "seed"), [('{"thinking_begin_token": 1, "thinking_end_token": 2}', 3), ("{}", 4)]
    )
    def test_other_options_or_seeds_are_named(self, store, text: str, seed: int) -> None:
        store.set("mtp_plugin/1", engine_checks.fingerprint(settings(text), seed))
        with pytest.raises(HostError, match="or another seed, in rank 1 than in rank 0"):
            expect_equal_ranks(self.rank(0), settings(), 3)

    def test_a_rank_without_the_plugin_is_named(self) -> None:
        with pytest.raises(HostError, match="on in rank 0, but not in rank 1: install"):
            expect_equal_ranks(self.rank(0), settings(), 3)

    def test_one_rank_compares_nothing(self) -> None:
        expect_equal_ranks(SimpleNamespace(world_size=1), settings(), 3)


def test_other_versions_are_refused_with_those_that_work(monkeypatch) -> None:
    monkeypatch.setattr(versions, "version", lambda _: "0.5.18")
    versions.installed.cache_clear()
    with pytest.raises(HostError, match=r"SGLang 0\.5\.18: version 0\.5\.18 is not serv") as error:
        hooks._resolved(arguments())
    assert "Install SGLang 0.5.17 or 0.5.23, or unset MTP_PLUGIN_SGLANG" in str(error.value)


def test_the_stored_versions_fit() -> None:
    found = signatures.stored()
    assert list(found) == list(SERVED)
    for version, reader in found.items():
        assert problems_of(version, reader) == []


def test_changed_code_is_named(monkeypatch, caplog) -> None:
    for version, text in json.loads(versions.BODIES.read_text(encoding="utf-8")).items():
        known = dict(zip(versions.SIGNATURES, text.split(), strict=True))
        assert versions.changed_bodies(version, {**known, hooks.VERIFY: ""}.get) == [hooks.VERIFY]
    monkeypatch.setattr(versions, "version", lambda _: "0.5.23")
    monkeypatch.setattr(versions, "problems_of", lambda *_, **__: [])
    versions.expect_fitting(is_scheduler=True)  # SGLang is not installed here: all differ
    assert hooks.VERIFY in caplog.text
    assert "ServerArgs" not in caplog.text  # of another process


def test_comments_and_docstrings_are_no_changes() -> None:
    texts = 'def f(a):\n    """x"""\n    return a', "def f(a): return a  # y", "def f(a): return -a"
    one, two, other = (body_hash(ast.parse(text).body[0]) for text in texts)
    assert one == two != other


@pytest.mark.parametrize(
    ("target", "found", "message"),
    [
        (hooks.VERIFY, None, "eagle_sample is missing"),
        (hooks.VERIFY, "verify_input, batch, logits_output, mask", "was expected to have the"),
        (hooks.VERIFY, "verify_input, batch, logits_output, grammar_mask, more", "optional ones"),
    ],
)
def test_a_different_function_is_named(target: str, found: str | None, message: str) -> None:
    reader = signatures.stored()["0.5.17"]
    reader._version["parameters"][target] = found
    (problem,) = problems_of("0.5.17", reader)
    assert message in problem


@pytest.mark.parametrize("name", engine_checks.REFUSED_FIELDS)
def test_a_refused_field_that_a_version_renames_is_named(name: str) -> None:
    is_old = f"ServerArgs.{name}" in SERVED["0.5.23"].lacks
    version = "0.5.17" if is_old else "0.5.23"
    reader = signatures.stored()[version]
    target = "sglang.srt.server_args:ServerArgs"
    names = reader._version["names"]
    names[target] = ", ".join(reader.names(target) - {name})
    assert problems_of(version, reader) == [f"sglang.srt.server_args.ServerArgs has no {name}"]
