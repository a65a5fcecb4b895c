"""Every mistake in a config has one line: the file, the key, what is expected, what was given."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
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
    load_plugin_options,
    parse_config,
)
from mtp_plugin.config.draft_vocab import resolve_draft_vocab
from mtp_plugin.config.schema import ConfigModel
from mtp_plugin.errors import ConfigError
from tests.hostile import HOSTILE, HOSTILE_YAML, is_short, suppress_short

FILES = yaml.safe_load((Path(__file__).parent / "refusals.yaml").read_text())
FORMS = {
    "config": "{}",
    "top": "{{model: m, {}}}\n",
    "mtp": "{{model: m, speculative_config: {{decoding_type: MTP, {}}}}}\n",
}


@pytest.mark.parametrize("case", FILES, ids=lambda case: case["message"][:60])
def test_file_is_refused(
    case: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ((form, content), (_, message)) = case.items()
    Path("config.yaml").write_text(FORMS[form].format(content))
    with pytest.raises(ConfigError) as error:
        load_config("config.yaml")
    assert str(error.value) == f"config.yaml: {message}"


@pytest.mark.parametrize("text", HOSTILE_YAML.values(), ids=HOSTILE_YAML)
def test_files_that_grow_are_refused_before_they_do(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="expected at most 1"):
        load_config(tmp_path / "config.yaml")


SYNTHETIC = {"verification": "synthetic", "synthetic_acceptance": (0.8, 0.6)}
HOST = "speculative_config: {decoding_type: MTP, max_draft_len: 3}\n"
OPTIONS = "verification: block\n"
NO_MTP = "f: speculative_config: expected one of decoding_type 'MTP' with o, got "
IDS, LINE = "mtp.draft_vocab: ids: ", "mtp.draft_vocab: ids, line 2: "


def mtp(layers: int | None = None, **options: Any) -> MTPDecodingConfig:
    config = MTPDecodingConfig(**options)
    return config if layers is None else config.resolve(layers)


def together(file: str, options: str, **others: Any) -> object:
    """A config with a file of the plugin's options."""
    Path("f").write_text(file)
    Path("o").write_text(options)
    return load_config("f", **{"model": "m", "plugin_options": "o", **others})


def plugin_options(content: str) -> object:
    Path("o").write_text(content)
    return load_plugin_options("o", "options")


def ids(content: str | bytes, vocab_size: int = 9) -> object:
    """The draft vocabulary in a file."""
    Path("ids").write_bytes(content if isinstance(content, bytes) else content.encode())
    return resolve_draft_vocab("ids", vocab_size)


def saved_ids(value: Any) -> object:
    torch.save(value, "ids")
    return resolve_draft_vocab("ids", 9)


def compressed_ids() -> object:
    """A small file with entries of 72 MB."""
    torch.save(torch.zeros(9_000_000, dtype=torch.int64), "stored")
    with ZipFile("stored") as stored, ZipFile("ids", "w", ZIP_DEFLATED) as compressed:
        for entry in stored.infolist():
            compressed.writestr(entry.filename, stored.read(entry))
    return resolve_draft_vocab("ids", 9)


def shared_lists() -> list[Any]:
    """Lists of lists that are 9**30 with each list counted each time."""
    found: list[Any] = []
    for _ in range(30):
        found = [found] * 9
    return found


def pipe() -> str:
    os.mkfifo("pipe")
    return "pipe"


def latin() -> str:
    Path("latin.yaml").write_bytes("model: größe\n".encode("latin-1"))
    return "latin.yaml"


def endless() -> str:
    """A device without an end, in the place of a file."""
    Path("zero").symlink_to("/dev/zero")
    return "zero"


def nul_model() -> object:
    Path("nul").write_text('model: "a\\0b"\n')
    return load_config("nul")


# fmt: off
CALLS: list[tuple[Callable[[], object], str]] = [
    (lambda: load_config("none.yaml"), "none.yaml: no such file; expected a YAML file"),
    (lambda: load_config("."), ".: cannot be read: Is a directory"),
    (lambda: load_config(latin()),
     "latin.yaml: expected UTF-8 text, got other bytes: 'utf-8' codec can't decode byte 0xf6 in "
     "position 9: invalid start byte"),
    (lambda: load_config(endless()),
     "zero: cannot be read: expected a regular file, got a pipe or a device"),
    (lambda: load_config("a\0b"), "'a\\x00b': expected a path: ..."),
    (nul_model, "nul: model: expected a path, got 'a\\x00b': ..."),
    (lambda: parse_config(["model"]),  # type: ignore[arg-type]
     "<mapping>: expected a mapping of keys to values, got a list"),
    (lambda: OtherDecodingConfig.model_validate("Toy"),
     "OtherDecodingConfig: should be a mapping, got 'Toy'"),
    (lambda: CudaGraphConfig(batch_sizes=(0,)),
     "CudaGraphConfig: batch_sizes.0: should be greater than or equal to 1, got 0"),
    (lambda: KVCacheConfig(dtype="fp8"),  # type: ignore[call-arg]
     "KVCacheConfig: dtype: the KV cache has the model's dtype; expected 'auto', got 'fp8'"),
    (lambda: mtp(verification="block"),
     "MTPDecodingConfig: verification: unknown key; it belongs under speculative_config.mtp"),
    # R44: vanilla on a checkpoint with one layer
    (lambda: mtp(1, max_draft_len=3, use_mtp_vanilla=True),
     "max_draft_len: 3 is more than the checkpoint's 1 MTP layer, and vanilla needs one per "
     "draft; expected at most 1, or use_mtp_vanilla: false"),
    (lambda: mtp(0),
     "speculative_config: expected a checkpoint with MTP layers, got 0; null (--no-mtp on the "
     "command line) decodes without MTP"),
    (lambda: mtp().draft_len,
     "max_draft_len: not known yet; expected a value in the config, or resolve() with the "
     "checkpoint's number of MTP layers first"),
    (lambda: mtp(1, mtp=SYNTHETIC),
     "MTPDecodingConfig: mtp.synthetic_acceptance: expected 1 rate, one per draft "
     "(max_draft_len), got 2"),
    (lambda: mtp(1, mtp={**SYNTHETIC, "synthetic_acceptance": ()}),
     "MTPDecodingConfig: mtp.synthetic_acceptance: expected 1 rate, one per draft "
     "(max_draft_len), got 0"),
    (lambda: MTPPluginOptions(**SYNTHETIC).acceptance_shares(3),
     "synthetic_acceptance: expected 3 rates, one per draft (max_draft_len), got 2"),
    (lambda: MTPPluginOptions().acceptance_shares(3),
     "synthetic_acceptance: expected 3 rates, one per draft (max_draft_len), got null"),
    # a host that chooses MTPWorker itself may construct such a config
    (lambda: mtp(3, max_draft_len=3, mtp={"chain": "none", "draft_window": "trtllm"}),
     "mtp.draft_window: 'trtllm' is for vanilla only; expected use_mtp_vanilla: true with "
     "it\nmtp.chain: 'none' is for vanilla only; expected use_mtp_vanilla: true with it"),
    (lambda: LLMConfig(model="m", max_num_tokens=16,
        speculative_config=mtp(use_mtp_vanilla=True)).resolve(3),
     "LLMConfig: max_num_tokens: expected at least max_batch_size (8) times max_draft_len + 1 "
     "(4), which is 32, got 16"),
    (lambda: SpeculativeDecodingMode.from_string("ngram"),
     "speculative decoding mode: expected one of NONE, MTP, MTP_EAGLE_ONE_MODEL, got 'ngram'"),
    (lambda: SpeculativeDecodingMode.from_string([]),  # type: ignore[arg-type]
     "speculative decoding mode: expected one of NONE, ..."),
    # the plugin's options in a file of their own
    (lambda: together("dtype: auto", OPTIONS), NO_MTP + "null"),
    (lambda: together("speculative_config: {decoding_type: Toy}", OPTIONS), NO_MTP + "a mapping"),
    (lambda: together("speculative_config: {decoding_type: MTP, mtp: {seed: 1}}", OPTIONS),
     "f: speculative_config.mtp: expected either it or o"),
    (lambda: together(HOST, "gate_margin: 0.2"),
     "f: speculative_config.mtp.gate_margin: 0.2 would be ignored; expected acceptance_window and "
     "acceptance_length_threshold with it"),
    (lambda: together(HOST, OPTIONS, model=None), "f: model: required key is missing"),
    (lambda: together(HOST, OPTIONS, plugin_options=endless()),
     "zero: cannot be read: expected a regular file, got a pipe or a device"),
    (lambda: load_plugin_options(5, "options"), "config: expected a file's path, got 5"),  # type: ignore[arg-type]
    (lambda: plugin_options("verifcation: block"),
     "options: verifcation: unknown key; did you mean verification?"),
    (lambda: plugin_options(""),
     "options: the file is empty; expected a mapping of the plugin's options"),
    (lambda: plugin_options("- seed"), "options: expected a mapping of keys to values, got a list"),
    (lambda: plugin_options("mtp: {}"),
     "options: mtp: unknown key; write the options themselves, without mtp around them"),
    (lambda: plugin_options("max_draft_len: 3"),
     "options: max_draft_len: unknown key; it belongs under speculative_config"),
    # the draft vocabulary
    (lambda: resolve_draft_vocab(10, 9),
     "mtp.draft_vocab: expected at most the vocabulary of 9, got 10"),
    (lambda: resolve_draft_vocab(10, 9, key="other"),
     "other: expected at most the vocabulary of 9, got 10"),
    (lambda: resolve_draft_vocab("none.json", 9, key="other"),
     "other: none.json: no such file; expected a file of token ids: a JSON list, an id or a range "
     "a..."),
    (lambda: resolve_draft_vocab("."), "mtp.draft_vocab: .: cannot be read: Is a directory"),
    (lambda: resolve_draft_vocab(pipe()),
     "mtp.draft_vocab: pipe: cannot be read: expected a regular file, got a pipe or a device"),
    (lambda: ids(b"\xff\xfe[1]"),
     IDS + "expected UTF-8 text, got other bytes: 'utf-8' codec can't decode..."),
    (lambda: ids("[]"), IDS + "expected at least one token id, got an empty list"),
    (lambda: ids(""), IDS + "expected at least one token id, got an empty list"),
    (lambda: ids('{"ids": [1]}'), IDS + "expected a list of token ids, got dict"),
    (lambda: ids('[1, true, null, 2.0, "3", [4], {}, -1]'),
     IDS + 'expected integers of at least 0, got true, null, 2.0, "3", [4] and 2 more'),
    (lambda: ids("[5, 1, 5, 2, 1, 5]"), IDS + "expected every id once, got 1, 5 more than once"),
    (lambda: ids("1-3\n2\n"), IDS + "expected every id once, got 2 more than once"),
    (lambda: ids("[8, 12, 1, 9]"), IDS + "expected ids of the vocabulary of 9, got 9, 12"),
    (lambda: ids("[1, 2"),
     IDS + "not valid JSON: Expecting ',' delimiter: line 1 column 6 (char 5)"),
    (lambda: ids("[" * 100_000), IDS + "not valid JSON: ..."),
    (lambda: ids("[" + "9" * 5000 + "]"), IDS + "not valid JSON: ..."),
    (lambda: ids("0-9\n20-99999999999"), LINE + "expected at most 16777216 ids, got more"),
    *((lambda line=line: ids(f"1\n{line}"), LINE + "expected a token id or a range such as 0...")
      for line in ("7,", "-2", "3-1", "1.5", "null", "9" * 19, "0-", "\u0663")),
    (lambda: saved_ids({"hot_token_id": torch.tensor([1])}),
     IDS + "expected a list of token ids, got dict"),
    (lambda: saved_ids([torch.tensor(1)]),
     IDS + 'expected integers of at least 0, got tensor(1)'),
    (lambda: saved_ids(shared_lists()), IDS + "expected integers of at least 0, got [[[[[...]..."),
    (compressed_ids, IDS + "expected entries of at most 67108864 bytes, got 720..."),
    (lambda: saved_ids(torch.zeros(1, dtype=torch.int64).expand(2**30)),
     IDS + "expected one dimension of at most..."),
    (lambda: saved_ids(torch.tensor([1]).to_sparse()), IDS + "cannot be loaded: ..."),
]
# fmt: on


@pytest.mark.parametrize("row", CALLS, ids=lambda row: row[1][:60])
def test_call_is_refused(
    row: tuple[Callable[[], object], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that end with ... go on in words of Python's or torch's."""
    monkeypatch.chdir(tmp_path)
    call, message = row
    found = message_of(call)
    if message.endswith("..."):
        assert found.startswith(message.removesuffix("..."))
    else:
        assert found == message


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
        "<mapping>: this is for several GPUs: use `trtllm-serve` with this package's adapter, or "
        "vLLM with its plugin",
    ]


def test_one_line_per_impossible_combination() -> None:
    spec = {"decoding_type": "MTP", "acceptance_window": 4, "mtp": {"gate_margin": 0.5}}
    found = message_of(
        lambda: parse_config(
            {"model": "m", "speculative_config": {**spec, "draft_len_schedule": {4: 3}}},
            source="job",
        )
    )
    assert [line.split(": ")[:2] for line in found.splitlines()] == [
        ["job", "speculative_config.draft_len_schedule"],
        ["job", "speculative_config.acceptance_window"],
    ]


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
