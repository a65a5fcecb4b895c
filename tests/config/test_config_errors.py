"""Every mistake in a config has one line: the file, the key, what is expected, what was given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtp_plugin.config import (
    CudaGraphConfig,
    KVCacheConfig,
    LLMConfig,
    MTPDecodingConfig,
    MTPPluginOptions,
    OtherDecodingConfig,
    SpeculativeDecodingMode,
    load_config,
    parse_config,
)
from mtp_plugin.config.schema import ConfigModel
from mtp_plugin.errors import ConfigError
from tests.hostile import HOSTILE, is_short, suppress_short

CASES = yaml.safe_load((Path(__file__).parent / "wrong_configs.yaml").read_text())


def text_of(case: dict[str, str]) -> str:
    """Return the file of a case."""
    if "config" in case:
        return case["config"]
    if "top" in case:
        return f"model: m\n{case['top']}\n"
    lines = "".join(f"  {line}\n" for line in case["mtp"].splitlines())
    return f"model: m\nspeculative_config:\n  decoding_type: MTP\n{lines}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["message"][:60])
def test_message(case: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(text_of(case))
    with pytest.raises(ConfigError) as error:
        load_config("config.yaml")
    assert str(error.value) == f"config.yaml: {case['message']}"


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value) == f"{path}: no such file; expected a YAML file"


def test_path_with_a_nul(tmp_path: Path) -> None:
    """Python's own words follow; they differ between its versions."""
    with pytest.raises(ConfigError) as error:
        load_config("a\0b")
    assert str(error.value).startswith("'a\\x00b': expected a path: ")
    path = tmp_path / "config.yaml"
    path.write_text('model: "a\\0b"\n')
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value).startswith(f"{path}: model: expected a path, got 'a\\x00b': ")


def test_folder_for_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path)
    assert str(error.value) == f"{tmp_path}: cannot be read: Is a directory"


def test_file_in_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes("model: größe\n".encode("latin-1"))
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value) == (
        f"{path}: expected UTF-8 text, got other bytes: "
        "'utf-8' codec can't decode byte 0xf6 in position 9: invalid start byte"
    )


def test_one_line_per_mistake() -> None:
    """All wrong keys and values of a file; combinations of a section once its values are valid."""
    wrong = {
        "max_batchsize": 4,
        "tensor_parallel_size": 2,
        "kv_cache_config": {"tokens_per_block": 0},
        "cuda_graph_config": {"prompt_tokens": [64]},
        "speculative_config": {
            "decoding_type": "MTP",
            "max_draft_len": "3",
            "relaxed_topk": 2,
            "mtp": {"verification": "exact", "kernel": "auto"},
        },
    }
    assert sorted(message_of(lambda: parse_config(wrong)).splitlines()) == [
        "<mapping>: cuda_graph_config.prompt_tokens: "
        "expected null or [] without enable_padding: true",
        "<mapping>: kv_cache_config.tokens_per_block: should be greater than or equal to 1, got 0",
        "<mapping>: max_batchsize: unknown key; did you mean max_batch_size?",
        "<mapping>: model: required key is missing",
        "<mapping>: speculative_config.max_draft_len: should be a valid integer, got '3'",
        "<mapping>: speculative_config.mtp.kernel: unknown key; did you mean kernels?",
        "<mapping>: speculative_config.mtp.verification: "
        "expected one of 'coupled', 'rejection', 'block', 'synthetic', got 'exact'",
        "<mapping>: tensor_parallel_size: this executor runs on one GPU; expected 1, got 2",
    ]


@pytest.mark.parametrize("name", ["mtp", "Mtp", "MTP"])
def test_decoding_type_is_read_in_any_case(name: str) -> None:
    config = parse_config({"model": "m", "speculative_config": {"decoding_type": name}})
    assert config.speculative_config == MTPDecodingConfig()
    assert MTPDecodingConfig(decoding_type=name).decoding_type == "MTP"


@pytest.mark.parametrize("name", ["max_draft_len", "num_nextn_predict_layers"])
@pytest.mark.filterwarnings("ignore:num_nextn_predict_layers:DeprecationWarning")
def test_total_draft_tokens_equal_to_k_are_accepted(name: str) -> None:
    config = MTPDecodingConfig(**{name: 3, "max_total_draft_tokens": 3})
    assert config == MTPDecodingConfig(max_draft_len=3)


def test_one_line_per_impossible_combination() -> None:
    spec = {"decoding_type": "MTP", "relaxed_topk": 4, "relaxed_delta": 0.5}
    with pytest.raises(ConfigError) as error:
        parse_config({"model": "m", "speculative_config": spec}, source="job")
    ending = "would be ignored; expected use_relaxed_acceptance_for_thinking: true with it"
    assert str(error.value).splitlines() == [
        f"job: speculative_config.relaxed_topk: 4 {ending}",
        f"job: speculative_config.relaxed_delta: 0.5 {ending}",
    ]


SYNTHETIC = {"verification": "synthetic", "synthetic_acceptance": (0.8, 0.6)}
CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "a list for a config": (
        lambda: parse_config(["model"]),  # type: ignore[arg-type]
        "<mapping>: expected a mapping of keys to values, got a list",
    ),
    "text for the config of another plugin": (
        lambda: OtherDecodingConfig.model_validate("Toy"),
        "OtherDecodingConfig: should be a mapping, got 'Toy'",
    ),
    "a section made in Python": (
        lambda: CudaGraphConfig(batch_sizes=(0,)),
        "CudaGraphConfig: batch_sizes.0: should be greater than or equal to 1, got 0",
    ),
    "a key of another section": (
        lambda: MTPDecodingConfig(verification="block"),
        "MTPDecodingConfig: verification: unknown key; it belongs under speculative_config.mtp",
    ),
    "R44: vanilla on a checkpoint with one layer": (
        lambda: MTPDecodingConfig(max_draft_len=3, use_mtp_vanilla=True).resolve(1),
        "max_draft_len: 3 is more than the checkpoint's 1 MTP layer, and vanilla needs one per "
        "draft; expected at most 1, or use_mtp_vanilla: false",
    ),
    "a checkpoint without MTP layers": (
        lambda: MTPDecodingConfig().resolve(0),
        "speculative_config: expected a checkpoint with MTP layers, got 0; null (--no-mtp on the "
        "command line) decodes without MTP",
    ),
    "K before resolution": (
        lambda: MTPDecodingConfig().draft_len,
        "max_draft_len: not known yet; expected a value in the config, or resolve() with the "
        "checkpoint's number of MTP layers first",
    ),
    "rates of two drafts for one": (
        lambda: MTPDecodingConfig(mtp=SYNTHETIC).resolve(1),
        "MTPDecodingConfig: mtp.synthetic_acceptance: expected 1 rate, one per draft "
        "(max_draft_len), got 2",
    ),
    "rates of no draft": (
        lambda: MTPDecodingConfig(mtp={**SYNTHETIC, "synthetic_acceptance": ()}).resolve(1),
        "MTPDecodingConfig: mtp.synthetic_acceptance: expected 1 rate, one per draft "
        "(max_draft_len), got 0",
    ),
    "shares of fewer drafts": (
        lambda: MTPPluginOptions(**SYNTHETIC).acceptance_shares(1),
        "synthetic_acceptance: expected 1 rate, one per draft (max_draft_len), got 2",
    ),
    "shares of more drafts": (
        lambda: MTPPluginOptions(**SYNTHETIC).acceptance_shares(3),
        "synthetic_acceptance: expected 3 rates, one per draft (max_draft_len), got 2",
    ),
    "shares without rates": (
        lambda: MTPPluginOptions().acceptance_shares(3),
        "synthetic_acceptance: expected 3 rates, one per draft (max_draft_len), got null",
    ),
    # a host that chooses MTPWorker itself may construct such a config
    "options of vanilla, once the mode is known": (
        lambda: MTPDecodingConfig(
            max_draft_len=3, mtp={"chain": "none", "draft_window": "trtllm"}
        ).resolve(3),
        "mtp.draft_window: 'trtllm' is for vanilla only; expected use_mtp_vanilla: true with it\n"
        "mtp.chain: 'none' is for vanilla only; expected use_mtp_vanilla: true with it",
    ),
    "a token budget, once K is known": (
        lambda: LLMConfig(
            model="m",
            max_num_tokens=16,
            speculative_config=MTPDecodingConfig(use_mtp_vanilla=True),
        ).resolve(3),
        "LLMConfig: max_num_tokens: expected at least max_batch_size (8) times "
        "max_draft_len + 1 (4), which is 32, got 16",
    ),
    "a mode of another name": (
        lambda: SpeculativeDecodingMode.from_string("ngram"),
        "speculative decoding mode: expected one of NONE, MTP, MTP_EAGLE_ONE_MODEL, got 'ngram'",
    ),
}


@pytest.mark.parametrize(("call", "message"), CALLS.values(), ids=CALLS)
def test_call_is_refused(call: Callable[[], object], message: str) -> None:
    assert message_of(call) == message


yaml_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)
known_keys = st.sampled_from(
    [*LLMConfig.model_fields, *MTPDecodingConfig.model_fields, *MTPPluginOptions.model_fields]
)
calm = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@calm
@given(
    st.dictionaries(known_keys, yaml_values, max_size=4),
    st.dictionaries(known_keys, yaml_values, max_size=6),
)
def test_any_mapping_is_a_config_or_a_config_error(
    top: dict[str, object], spec: dict[str, object]
) -> None:
    wrong = {"model": "m", **top, "speculative_config": {"decoding_type": "MTP", **spec}}
    expected = message_of(lambda: parse_config(wrong))
    assert all(line.startswith("<mapping>: ") for line in expected.splitlines())


@calm
@given(st.text(max_size=200) | st.text(alphabet="model: {}[]\n-&*!|>'\"#,?1\t", max_size=60))
def test_any_text_is_a_config_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    expected = message_of(lambda: load_config(path))
    assert all(line.startswith(f"{path}: ") for line in expected.splitlines())


def message_of(call: Callable[[], object]) -> str:
    """What a `ConfigError` says; nothing where the call succeeds."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


# --- values that nothing means ---

SECTIONS: dict[tuple[str, ...], type[ConfigModel]] = {
    (): LLMConfig,
    ("kv_cache_config",): KVCacheConfig,
    ("cuda_graph_config",): CudaGraphConfig,
    ("speculative_config",): MTPDecodingConfig,
    ("speculative_config", "mtp"): MTPPluginOptions,
}


def holding(path: tuple[str, ...], key: Any, value: Any) -> dict[str, Any]:
    """A mapping for `parse_config` with a value somewhere in it."""
    top: dict[Any, Any] = {"model": "m", "speculative_config": {"decoding_type": "MTP"}}
    section = top
    for step in path:
        section = section.setdefault(step, {})
    section[key] = value
    return top


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_no_value_ends_in_another_error(value: Any) -> None:
    """Under any key each is taken, set aside, or refused in lines that can be read."""
    for path, section in SECTIONS.items():
        # `test_host_keys.py` has every host key
        for key in (*section.model_fields, *list(section.host_keys)[::10], "nonsense"):
            with suppress_short(ConfigError):
                parse_config(holding(path, key, value))


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_no_key_ends_in_another_error(value: Any) -> None:
    if type(value).__hash__ is None:
        value = repr(type(value))
    for path in SECTIONS:
        with pytest.raises(ConfigError) as refused:
            parse_config(holding(path, value, 1))
        assert is_short(refused.value)


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_no_path_ends_in_another_error(value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(value)
    assert is_short(refused.value)


LONG = dict.fromkeys(range(1, 10002), 1)


@pytest.mark.parametrize(
    ("path", "key", "value", "message"),
    [
        ((), "max_batch_size", 10**5000, "less than or equal to 9223372036854775807, got an int"),
        (("cuda_graph_config",), "batch_sizes", [1] * 10**6, "at most 10000 items, got a list"),
        (("speculative_config",), "draft_len_schedule", LONG, "at most 10000 items, got a mapping"),
    ],
    ids=["digits", "items", "keys"],
)
def test_what_is_too_much(path: tuple[str, ...], key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(holding(path, key, value))
    assert f": {'.'.join([*path, key])}: should " in str(refused.value)
    assert message in str(refused.value)


def test_many_problems_are_cut() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config({"model": "m", **{f"key{i}": 1 for i in range(150)}})
    lines = str(refused.value).splitlines()
    assert len(lines) == 21
    assert lines[-1] == "<mapping>: and 130 more problems"


@pytest.mark.parametrize("name", ["config.yaml", "plugin.yaml"])
def test_a_device_without_an_end_is_no_config(tmp_path: Path, name: str) -> None:
    """A file may be a link to one."""
    (tmp_path / name).symlink_to("/dev/zero")
    (tmp_path / "good.yaml").write_text("model: m\nspeculative_config: {decoding_type: MTP}\n")
    wrong = str(tmp_path / name)
    given = (wrong, None) if name == "config.yaml" else (tmp_path / "good.yaml", wrong)
    with pytest.raises(ConfigError) as refused:
        load_config(given[0], plugin_options=given[1])
    assert str(refused.value) == (
        f"{wrong}: cannot be read: expected a regular file, got a pipe or a device"
    )
