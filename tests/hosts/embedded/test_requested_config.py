"""`LLM` as people call it: a checkpoint with options, a YAML file, a config."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.random_models import write_random_checkpoint
from mtp_plugin.config import (
    CudaGraphConfig,
    KVCacheConfig,
    KvCacheConfig,
    LLMConfig,
    MTPDecodingConfig,
    load_config,
)
from mtp_plugin.errors import CheckpointError, ConfigError, format_value
from mtp_plugin.hosts import tensorrt_llm
from mtp_plugin.hosts.embedded import LLM, SamplingParams
from mtp_plugin.hosts.embedded.requested_config import config_of_checkpoint, read_requested_config

CACHE = {"tokens_per_block": 4, "max_tokens": 256}
SMALL: dict[str, Any] = {"max_seq_len": 64, "max_batch_size": 4, "kv_cache_config": CACHE}
DRAFTING = {"decoding_type": "MTP", "max_draft_len": 2, "use_mtp_vanilla": True}
CHOSEN = "speculative_config: none given, 3 MTP layers: drafting with max_draft_len 3 (eagle)"
SHORT = SamplingParams(max_new_tokens=6, ignore_eos=True)


@pytest.fixture
def plain(tmp_path: Path) -> str:
    """A checkpoint without MTP layers."""
    path = tmp_path / "plain"
    write_random_checkpoint(path, "glm4_moe", num_mtp_layers=0, seed=1)
    return str(path)


@pytest.fixture
def file(harness, tmp_path: Path) -> str:
    path = tmp_path / "some.yaml"
    path.write_text(
        f"model: {harness.path}\nmax_seq_len: 32\nkv_cache_config: {{max_tokens: 256}}\n"
    )
    return str(path)


def draft_len(config: LLMConfig) -> int | None:
    spec = config.speculative_config
    return spec.max_draft_len if isinstance(spec, MTPDecodingConfig) else None


def test_a_script_of_tensorrt_llm(harness) -> None:
    requested = read_requested_config(
        None,
        harness.path,
        {
            "backend": "pytorch",
            "kv_cache_config": KvCacheConfig(enable_block_reuse=True, max_tokens=256),
            "cuda_graph_config": CudaGraphConfig(max_batch_size=4),
            "speculative_config": tensorrt_llm.MTPDecodingConfig(max_draft_len=2),
            "max_beam_width": 1,
        },
        None,
    )
    assert requested.config.kv_cache_config == KVCacheConfig(max_tokens=256)
    assert requested.config.cuda_graph_config == CudaGraphConfig(max_batch_size=4)
    assert draft_len(requested.config) == 2


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("by_name", [True, False])
def test_a_checkpoint_drafts_by_itself(harness, target, capsys, kind, by_name) -> None:
    path = kind(harness.path)
    llm = LLM(model=path, **SMALL) if by_name else LLM(path, **SMALL)
    with llm:
        assert draft_len(llm.config) == 3
        assert not llm.config.speculative_config.use_mtp_vanilla
        output = llm.generate([1, 2, 3], SHORT)
    assert output.token_ids == target.greedy([1, 2, 3], 6)
    assert output.acceptance.num_drafted > 0
    assert (llm.config.max_batch_size, llm.max_seq_len) == (4, 64)
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"{CHOSEN}\n")


@pytest.mark.parametrize("given", [DRAFTING, MTPDecodingConfig.model_validate(DRAFTING)])
def test_a_speculative_config_with_a_checkpoint(harness, capsys, given) -> None:
    with LLM(model=harness.path, speculative_config=given, **SMALL) as llm:
        assert llm.config.speculative_config == MTPDecodingConfig.model_validate(DRAFTING)
    with LLM(
        harness.path, model=harness.model, speculative_config=None, device=harness.host["device"]
    ) as llm:
        assert llm.config.speculative_config is None
        assert llm.model is harness.model
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "drafting", [{}, {"speculative_config": DRAFTING}, {"speculative_config": None}]
)
def test_a_seed_with_a_checkpoint(harness, drafting) -> None:
    config = config_of_checkpoint(str(harness.path), {"seed": 7, **drafting}, lambda _: None)
    assert config.engine_seed == 7
    with LLM(config, model=harness.model) as llm:
        assert llm.pieces.manager.engine_seed == 7


def test_a_checkpoint_without_mtp_layers(plain, capsys) -> None:
    with LLM(plain, **SMALL) as llm:
        output = llm.generate([1, 2, 3], SHORT)
    assert output.acceptance.num_drafted == 0
    assert capsys.readouterr().err == (
        "speculative_config: none given, no MTP layers: decoding without drafts\n"
    )


def test_the_default_is_reported_to_on_progress(harness, capsys) -> None:
    lines: list[str] = []
    LLM(harness.path, model=harness.model, on_progress=lines.append, **SMALL).shutdown()
    assert lines[0] == CHOSEN
    assert lines[-1] == "ready"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("layers", "options", "expected"),
    [
        (1, {}, 1),
        (2, {}, 2),
        (5, {}, 3),
        (3, {"max_batch_size": 100, "max_num_tokens": 300}, 2),
        (3, {"max_batch_size": 100, "max_num_tokens": 199}, None),
    ],
)
def test_how_many_drafts(tmp_path, layers, options, expected) -> None:
    lines: list[str] = []
    path = tmp_path / "some"
    write_random_checkpoint(path, "glm4_moe", num_mtp_layers=layers, seed=1)
    assert draft_len(config_of_checkpoint(str(path), options, lines.append)) == expected
    (line,) = lines
    if expected is None:
        assert line == (
            "speculative_config: none given, max_num_tokens 199 has no room for drafts of 100 "
            "requests: decoding without drafts"
        )
    else:
        assert f"{layers} MTP layer" in line
        assert f"max_draft_len {expected} (eagle)" in line


@pytest.mark.parametrize(
    ("options", "is_captured"),
    [
        ({}, True),
        ({"cuda_graph_config": None}, False),
        ({"enforce_eager": True}, False),
        ({"enforce_eager": False}, True),
        ({"device": "cpu"}, False),
        ({"speculative_config": None}, True),
    ],
)
def test_steps_run_in_graphs_on_a_gpu(harness, monkeypatch, options, is_captured) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    lines: list[str] = []
    config = config_of_checkpoint(harness.path, options, lines.append)
    graphs = CudaGraphConfig(enable_padding=True)
    assert config.cuda_graph_config == (graphs if is_captured else None)
    line = "cuda_graph_config: none given: steps run in CUDA graphs"
    assert lines.count(line) == is_captured


def test_the_other_forms_say_themselves_whether_to_draft(harness, file, capsys) -> None:
    for config in (
        file,
        Path(file),
        {"model": harness.path, **SMALL},
        LLMConfig(model=harness.path),
    ):
        with LLM(config, model=harness.model) as llm:
            assert llm.config.speculative_config is None
    assert capsys.readouterr().err == ""


def test_another_checkpoint_in_a_configs_place(harness, file) -> None:
    mapping = {"model": "elsewhere", **SMALL}
    for config in (file, mapping, LLMConfig.model_validate(mapping)):
        with LLM(config, model=harness.path) as llm:
            assert llm.config.model == harness.path
    del mapping["model"]
    with LLM(mapping, model=harness.path) as llm:
        assert llm.config.model == harness.path


class Letters:
    """A tokenizer of one text."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        del text, add_special_tokens
        return [7, 8]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        del skip_special_tokens
        return "x" * len(token_ids)


def test_a_tokenizer_by_its_folder(harness, monkeypatch, tmp_path: Path) -> None:
    requested: list[Path] = []
    monkeypatch.setattr(
        "mtp_plugin.hosts.embedded.requested_config.read_tokenizer_of",
        lambda path: requested.append(path) or Letters(),
    )
    (tmp_path / "tokenizer.json").write_text("{}")
    for folder in (str(tmp_path), tmp_path):
        with LLM(harness.path, model=harness.model, tokenizer=folder, **SMALL) as llm:
            output = llm.generate("a text", SHORT)
        assert (output.prompt_token_ids, output.text) == ([7, 8], "xxxxxx")
    assert requested == [tmp_path] * 2


class GoneTerminal(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(text)


@pytest.mark.parametrize("stream", [None, GoneTerminal()], ids=["none", "gone"])
def test_the_default_is_reported_nowhere_without_standard_error(
    harness, monkeypatch, stream: Any
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with LLM(harness.path, model=harness.model, **SMALL) as llm:
        assert llm.pieces.plan.max_draft_len > 0


@pytest.mark.parametrize(
    "given",
    ["", "nul\0", "x" * 5000, "org/name"],
    ids=["nothing", "nul", "long", "name-of-a-hub"],
)
def test_a_folder_without_a_tokenizer(harness, given: str) -> None:
    with pytest.raises(ConfigError) as error:
        LLM(harness.path, model=harness.model, tokenizer=given, **SMALL)
    expected = "tokenizer: expected a folder with tokenizer.json, got "
    assert str(error.value) == expected + format_value(given)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("settings", "message"),
    [("[]", "tokenizer_config.json: expected a JSON object"), ('{"auto_map": 5}', "")],
    ids=["a-list", "code-of-its-own"],
)
def test_a_tokenizer_whose_files_are_wrong(
    harness, tmp_path: Path, settings: str, message: str
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(CheckpointError) as error:
        LLM(harness.path, model=harness.model, tokenizer=tmp_path, **SMALL)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["mtp.json", "options"])
def test_a_config_file_may_lie_in_the_folder_of_a_checkpoint(
    harness, tmp_path: Path, name: str
) -> None:
    """With any name but those of the checkpoint's own files."""
    shutil.copytree(harness.path, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text(json.dumps({"model": str(tmp_path), "max_seq_len": 64}))
    assert load_config(tmp_path / name).max_seq_len == 64


WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "nothing": (
        (),
        {},
        "config: expected a checkpoint's folder, a YAML file, a mapping or an LLMConfig, got "
        "nothing",
    ),
    "a number": (
        (3,),
        {},
        "config: expected a checkpoint's folder, a YAML file, a mapping or an LLMConfig, got int",
    ),
    "a model of another kind": (
        ("CHECKPOINT",),
        {"model": 3},
        "model: expected a checkpoint's folder or a LoadedModel, got int",
    ),
    "two folders": (
        ("CHECKPOINT",),
        {"model": "CHECKPOINT"},
        "model: expected one checkpoint's folder, got CHECKPOINT and CHECKPOINT",
    ),
    "a name of a hub": (
        ("some/model",),
        {},
        "some/model: expected a checkpoint's folder or a YAML file, there is neither (nothing is "
        "fetched from a hub); download the model: hf download some/model --local-dir some/model",
    ),
    "a file of a checkpoint": (
        ("CHECKPOINT/config.json",),
        {},
        "CHECKPOINT/config.json: expected a YAML file, got a file of a checkpoint; give its folder "
        "CHECKPOINT",
    ),
    "no such file": (
        ("none.yaml",),
        {},
        "none.yaml: no such file; expected a YAML file",
    ),
    "no such file in the folder of a checkpoint": (
        ("CHECKPOINT/none",),
        {},
        "CHECKPOINT/none: expected a checkpoint's folder or a YAML file, there is neither (nothing "
        "is fetched from a hub)",
    ),
    "home of an unknown user": (
        ("~nosuchuser/x",),
        {},
        "~nosuchuser/x: Could not determine home directory.",
    ),
    "an empty name": ((), {"model": ""}, "LLM: model: should have at least 1 character, got ''"),
    "a misspelt option": (
        ("CHECKPOINT",),
        {"max_batchsize": 3},
        "LLM: max_batchsize: unknown key; did you mean max_batch_size?",
    ),
    "an option of another engine": (
        ("CHECKPOINT",),
        {"num_gpu_blocks_override": 3},
        "LLM: num_gpu_blocks_override: unknown key; write kv_cache_config: {max_tokens: _}, a "
        "number of tokens",
    ),
    "an option with a file": (
        ("FILE",),
        {"max_batch_size": 3, "dtype": "auto"},
        "max_batch_size, dtype: expected in FILE; keyword options are accepted with a checkpoint's "
        "folder only",
    ),
    "an option with a mapping": (
        ({"model": "x"},),
        {"max_batch_size": 3},
        "max_batch_size: expected in the dict; keyword options are accepted with a checkpoint's "
        "folder only",
    ),
    "a config that was not validated": (
        (LLMConfig.model_construct(model=5),),
        {},
        "LLMConfig: model: should be a valid string, got 5",
    ),
    "a config without a value": (
        (LLMConfig.model_construct(max_batch_size=None),),
        {},
        "LLMConfig: model: required key is missing\n"
        "LLMConfig: max_batch_size: should be a valid integer, got null",
    ),
    "a section that was not validated": (
        (
            LLMConfig.model_construct(
                model="m", kv_cache_config=KVCacheConfig.model_construct(max_tokens=0)
            ),
        ),
        {},
        "LLMConfig: kv_cache_config: max_tokens: should be greater than or equal to 1, got 0",
    ),
    "no path at all": (("x" * 5000,), {}, f"{'x' * 200!r}...: File name too long"),
    "progress to no function": (
        ("CHECKPOINT",),
        {"on_progress": 3},
        "on_progress: expected a function of a line of text, got 3",
    ),
    "a tokenizer that is none": (
        ("CHECKPOINT",),
        {"tokenizer": 3},
        "tokenizer: expected one with encode and decode, got 3 without encode",
    ),
    "a chunk policy that is none": (
        ("CHECKPOINT",),
        {"chunk_policy": None},
        "chunk_policy: expected a function, got None",
    ),
    "a stop callback that is none": (
        ("CHECKPOINT",),
        {"stop_callback": 3},
        "stop_callback: expected a function, got 3",
    ),
    "a fill that is none": (
        ("CHECKPOINT",),
        {"kv_fill": None},
        "kv_fill: expected a number, got None",
    ),
    "a fill beyond half precision": (
        ("CHECKPOINT",),
        {"kv_fill": 1e30},
        "kv_fill: expected a number, got 1e+30",
    ),
}


@pytest.mark.parametrize(("arguments", "options", "message"), WRONG.values(), ids=WRONG)
def test_calls_that_cannot_be(harness, file, arguments, options, message) -> None:
    def filled(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return value.replace("CHECKPOINT", harness.path).replace("FILE", file)

    options = {name: filled(value) for name, value in options.items()}
    with pytest.raises(ConfigError) as caught:
        LLM(*map(filled, arguments), **options)
    assert str(caught.value) == filled(message)


def test_section_of_a_derived_class_stays() -> None:
    class Derived(MTPDecodingConfig):
        extra: int = 0

    config = LLMConfig(model="m", speculative_config=Derived(max_draft_len=1, extra=3))
    speculative = read_requested_config(config, None, {}, None).config.speculative_config
    assert type(speculative) is Derived
    assert speculative.extra == 3


def test_a_loaded_model_alone(harness) -> None:
    with pytest.raises(ConfigError, match="in addition to the loaded model"):
        LLM(model=harness.model)


def test_a_folder_without_a_checkpoint(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
        LLM(tmp_path)
    with pytest.raises(CheckpointError, match="none"):
        LLM(model=str(tmp_path / "none"))
