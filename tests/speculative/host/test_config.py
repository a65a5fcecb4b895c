"""What is read of a decoding config: the project's own, a host's, and what was read before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mtp_plugin.config import MTPDecodingConfig, MTPPluginOptions
from mtp_plugin.errors import ConfigError
from mtp_plugin.requests.thinking import ThinkingEnd
from mtp_plugin.speculative.drafting import MTPEagleWorker, MTPWorker, NoDraftsWorker
from mtp_plugin.speculative.host import DecodingOptions

RELAXED = {
    "use_relaxed_acceptance_for_thinking": True,
    "relaxed_topk": 5,
    "relaxed_delta": 0.25,
    "begin_thinking_phase_token": 90,
    "end_thinking_phase_token": 91,
}
READ = DecodingOptions(
    max_draft_len=3,
    use_relaxed_acceptance_for_thinking=True,
    relaxed_topk=5,
    relaxed_delta=0.25,
    thinking_tokens=(90, 91),
    thinking_end=ThinkingEnd(begin=90, end=(91,), end_token=91),
)


def host(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"max_draft_len": 3, **fields})


def test_the_projects_own_config() -> None:
    plugin = {"chain": "none", "keep_warm": False, "kernels": "reference"}
    config = MTPDecodingConfig(max_draft_len=3, mtp=plugin, **RELAXED)
    options = DecodingOptions.read(config)
    assert options.mtp is config.mtp
    assert options == DecodingOptions(**{**vars(READ), "mtp": MTPPluginOptions(**plugin)})


def test_a_config_without_options() -> None:
    options = DecodingOptions.read(host())
    assert options == DecodingOptions(max_draft_len=3)
    assert options.thinking_tokens == (-1, -1)
    assert (options.relaxed_topk, options.relaxed_delta) == (1, 0.0)
    assert options.mtp == MTPPluginOptions()


@pytest.mark.parametrize("spelling", [str.lower, str.upper])
def test_thinking_tokens_in_either_case(spelling: Any) -> None:
    names = {name: RELAXED[name] for name in RELAXED if name.endswith("_token")}
    others = {name: RELAXED[name] for name in RELAXED if name not in names}
    given = {spelling(name): value for name, value in names.items()}
    assert DecodingOptions.read(host(**others, **given)) == READ


def test_thinking_tokens_that_a_host_hands_in() -> None:
    for config in (host(**RELAXED), READ):
        options = DecodingOptions.read(config, thinking_tokens=(4, 5))
        assert options.thinking_tokens == (4, 5)
        assert options.relaxed_topk == 5
    assert DecodingOptions.read(host(relaxed_topk=5.0)).relaxed_topk == 5


@pytest.mark.parametrize(
    ("fields", "k"),
    [
        ({"max_draft_len": 3, "num_nextn_predict_layers": 1}, 3),
        ({"max_draft_len": None, "num_nextn_predict_layers": 2}, 2),
        ({"num_nextn_predict_layers": 2}, 2),
    ],
)
def test_names_of_k(fields: dict[str, Any], k: int) -> None:
    assert DecodingOptions.read(SimpleNamespace(**fields)).max_draft_len == k


def test_options_of_the_plugin_that_a_host_names() -> None:
    """Some fields of a namespace; the others are the defaults, further ones are the host's."""
    mtp = SimpleNamespace(
        draft_window="trtllm", kernels="reference", draft_vocab=None, of_the_host=object()
    )
    options = DecodingOptions.read(host(mtp=mtp)).mtp
    assert options == MTPPluginOptions(draft_window="trtllm", kernels="reference")
    for nothing in (None, SimpleNamespace(), {}):
        assert DecodingOptions.read(host(mtp=nothing)).mtp == MTPPluginOptions()


def test_synthetic_acceptance_of_a_host() -> None:
    mtp = SimpleNamespace(verification="synthetic", synthetic_acceptance=0.5, synthetic_seed=3)
    options = DecodingOptions.read(host(mtp=mtp)).mtp
    assert options.acceptance_shares(3) == (0.5, 0.25, 0.125)
    assert (options.is_synthetic, options.synthetic_seed) == (True, 3)


def test_values_that_a_host_left_unset() -> None:
    """None is not given."""
    fields = dict.fromkeys(RELAXED) | {"mtp": None}
    assert DecodingOptions.read(host(**fields)) == DecodingOptions(max_draft_len=3)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SimpleNamespace(), "gives no max_draft_len and no num_nextn_predict_layers"),
        (host(max_draft_len=0), "max_draft_len: expected an integer >= 1, got 0"),
        (host(max_draft_len="2"), "max_draft_len: expected an integer >= 1, got '2'"),
        (
            SimpleNamespace(num_nextn_predict_layers=2.0),
            "num_nextn_predict_layers: expected an integer >= 1, got 2.0",
        ),
        (host(relaxed_topk=2**31), "relaxed_topk: expected an integer from 1 to 2147483647, got"),
        (
            host(mtp=SimpleNamespace(draft_window="short")),
            "mtp: draft_window: should be 'exact' or 'trtllm', got 'short'",
        ),
        (
            host(mtp=SimpleNamespace(keep_warm="yes")),
            "mtp: keep_warm: should be a valid boolean, got 'yes'",
        ),
        (
            host(mtp=SimpleNamespace(synthetic_seed=3)),
            "mtp: synthetic_seed: 3 would be ignored; expected verification: synthetic",
        ),
        (DecodingOptions(max_draft_len=0), "max_draft_len: expected an integer >= 1, got 0"),
    ],
)
def test_values_that_cannot_be(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DecodingOptions.read(config)


def test_options_that_were_read_before() -> None:
    """A plugin reads a config once, for all its pieces."""
    assert DecodingOptions.read(READ) is READ
    none = DecodingOptions(max_draft_len=0)
    assert DecodingOptions.read(none, least_draft_len=0) is none
    assert NoDraftsWorker(none, device="cpu").max_draft_len == 0
    for kind in (MTPWorker, MTPEagleWorker):
        assert kind(READ, device="cpu").verifier.modes[1].thinking_tokens == (90, 91)
        with pytest.raises(ConfigError, match="max_draft_len: expected an integer >= 1, got 0"):
            kind(none, device="cpu")
