"""Broken forms of a checkpoint: what `doctor --host vllm` and the embedded executor report."""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtp_plugin import LLM, extras
from mtp_plugin.__main__ import main as cli_main
from mtp_plugin.checkpoint import Checkpoint, describe, read_checkpoint
from mtp_plugin.config import MTPDecodingConfig
from mtp_plugin.errors import LONGEST_LINE, CheckpointError
from mtp_plugin.hosts.embedded.models import preflight
from mtp_plugin.hosts.tensorrt_llm import checks as tensorrt_llm_checks
from mtp_plugin.hosts.tensorrt_llm import model_check as tensorrt_llm_check
from mtp_plugin.hosts.vllm import model_check
from mtp_plugin.hosts.vllm.checks import Examination
from mtp_plugin.hosts.vllm.model_check import main, verdict
from tests.hostile import HOSTILE_PATTERNS, HOSTILE_TEXT

TINY = Path(__file__).parents[2] / "integration/tiny_model/checkpoint"
BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "I32": 4}
Header = dict[str, tuple[str, list[int]]]
"""Name -> dtype, shape."""
Edit = Callable[[dict[str, Any], Header], object]
LAYERS = ("model.layers.12.", "model.layers.13.", "model.layers.14.")


def tiny_header() -> Header:
    with (TINY / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {n: (e["dtype"], e["shape"]) for n, e in header.items() if n != "__metadata__"}


def write_file(file: Path, tensors: Header) -> None:
    """Write a header and zeros."""
    entries, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + BYTES[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(header)) + header)
        opened.truncate(8 + len(header) + end)


def write(path: Path, edit: Edit, *, shards: int = 1, mtp_file: bool = False, index: bool) -> None:
    config, tensors = json.loads((TINY / "config.json").read_text()), tiny_header()
    edit(config, tensors)
    (path / "config.json").write_text(json.dumps(config))
    own = {n: t for n, t in tensors.items() if mtp_file and n.startswith(LAYERS)}
    listed = {name: tensor for name, tensor in tensors.items() if name not in own}
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard}.safetensors" if index or shards > 1 else "model.safetensors"
        part = dict(list(listed.items())[shard::shards])
        write_file(path / file, part)
        weight_map |= dict.fromkeys(part, file)
    if own:
        write_file(path / "mtp.safetensors", own)
    if index:
        content = {"metadata": {}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(content))


def drop(*begins: str) -> Edit:
    def edit(_: dict[str, Any], tensors: Header) -> None:
        for name in [name for name in tensors if name.startswith(begins)]:
            del tensors[name]

    return edit


def rename(old: str, new: str) -> Edit:
    def edit(_: dict[str, Any], tensors: Header) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[name.replace(old, new, 1)] = tensors.pop(name)

    return edit


def declare(**values: Any) -> Edit:
    return lambda config, _: config.update(values)


def quantize(*begins: str) -> Edit:
    def edit(_: dict[str, Any], tensors: Header) -> None:
        for name, (_dtype, shape) in list(tensors.items()):
            if name.startswith(begins) and name.endswith(("_proj.weight", "head.weight")):
                tensors[name] = ("F8_E4M3", shape)
                tensors[f"{name}_scale"] = ("F32", [1])

    return edit


def pack(*begins: str) -> Edit:
    def edit(_: dict[str, Any], tensors: Header) -> None:
        for name in [name for name in tensors if name.startswith(begins)]:
            if name.endswith("_proj.weight"):
                stem = name.removesuffix("weight")
                _dtype, (rows, columns) = tensors.pop(name)
                tensors[f"{stem}qweight"] = ("I32", [columns // 8, rows])
                tensors[f"{stem}scales"] = ("BF16", [1, rows])

    return edit


def fuse_experts(_: dict[str, Any], tensors: Header) -> None:
    for name, (dtype, shape) in list(tensors.items()):
        stem, experts, rest = name.partition(".experts.")
        if experts and name.startswith(LAYERS):
            del tensors[name]
            if rest.endswith("gate_proj.weight"):
                tensors[f"{stem}.experts.gate_up_proj"] = (dtype, [4, 2 * shape[0], shape[1]])
            elif rest.endswith("down_proj.weight"):
                tensors[f"{stem}.experts.down_proj"] = (dtype, [4, *shape])


def leave_copies(config: dict[str, Any], tensors: Header) -> None:
    drop(*LAYERS)(config, tensors)
    tensors["model.layers.12.embed_tokens.weight"] = ("BF16", [2048, 192])


def all_of(*edits: Edit) -> Edit:
    return lambda config, tensors: [edit(config, tensors) for edit in edits]


FP8 = declare(quantization_config={"quant_method": "fp8"})
TARGET = tuple(f"model.layers.{layer}." for layer in range(12))
NO_MTP = "config.json declares 3 MTP layer(s), the files have none of their tensors"
CHECKPOINTS: dict[str, tuple[Edit, dict[str, Any], str, str]] = {
    # name: edit, how it is written, what vLLM does, begin of the problem
    "whole": (declare(), {}, "drafts", ""),
    "shards without an index": (declare(), {"shards": 2, "mtp_file": True}, "drafts", ""),
    "experts as one tensor": (fuse_experts, {}, "drafts", ""),
    "no MTP tensors": (drop(*LAYERS), {}, "refuses", NO_MTP),
    "copies alone": (leave_copies, {}, "refuses", NO_MTP),
    "no MTP tensors, quantized": (
        all_of(drop(*LAYERS), quantize(*TARGET), FP8),
        {},
        "drafts at random",
        NO_MTP,
    ),
    "a projection is missing": (
        drop("model.layers.13.self_attn.o_proj"),
        {},
        "drafts at random",
        "1 tensor(s) of the MTP layers are missing: model.layers.13.self_attn.o_proj.weight",
    ),
    "a norm is missing": (
        drop("model.layers.14.enorm"),
        {},
        "refuses",
        "1 tensor(s) of the MTP layers are missing: model.layers.14.enorm.weight",
    ),
    "an expert is missing": (
        drop("model.layers.12.mlp.experts.2."),
        {},
        "drafts at random",
        "3 tensor(s) of the MTP layers are missing: model.layers.12.mlp.experts.2.down_proj.weight",
    ),
    "further tensors": (
        rename("model.layers.12.self_attn.q_norm", "model.layers.12.self_attn.qk_norm"),
        {},
        "refuses",
        "1 tensor(s) of the MTP layers are missing: model.layers.12.self_attn.q_norm.weight",
    ),
    "a file that the index does not name": (
        declare(),
        {"shards": 2, "mtp_file": True, "index": True},
        "refuses",
        "model.safetensors.index.json does not name mtp.safetensors, which has MTP tensors",
    ),
    "more layers declared": (
        declare(num_nextn_predict_layers=4),
        {},
        "refuses",
        "config.json declares 4 MTP layers, the files have 3: set num_nextn_predict_layers to 3",
    ),
    "a layer in the middle is missing": (
        drop("model.layers.13."),
        {},
        "refuses",
        "config.json declares 3 MTP layers, the files have 2: take the files of the original",
    ),
    "fewer layers declared": (
        declare(num_nextn_predict_layers=1),
        {},
        "refuses",
        "config.json declares 1 MTP layer(s), the files have 3: set num_nextn_predict_layers to 3",
    ),
    "none declared": (
        declare(num_nextn_predict_layers=0),
        {},
        "refuses",
        "config.json declares no MTP layer(s), the files have 3: set num_nextn_predict_layers to 3",
    ),
    "no head": (
        drop("lm_head"),
        {},
        "refuses",
        "lm_head.weight is missing, and tie_word_embeddings is false",
    ),
    "head quantized, no method": (
        quantize("lm_head"),
        {},
        "refuses",
        "1 weight(s) of the head are quantized, config.json names no method and leaves them out",
    ),
    "head quantized by another method": (
        all_of(quantize("lm_head", *TARGET, *LAYERS), FP8),
        {},
        "refuses",
        "1 weight(s) of the head are quantized, the quantization config (fp8) leaves them out",
    ),
    "MTP layers not quantized": (
        all_of(quantize(*TARGET), FP8),
        {},
        "drafts at random",
        "57 weight(s) of the MTP layers are not quantized, the quantization config (fp8) covers",
    ),
    "MTP layers not packed": (
        all_of(pack(*TARGET), declare(quantization_config={"quant_method": "gptq"})),
        {},
        "refuses",
        "57 weight(s) of the MTP layers are not quantized, the quantization config (gptq) covers",
    ),
    "packed": (
        all_of(pack(*TARGET, *LAYERS), declare(quantization_config={"quant_method": "gptq"})),
        {},
        "drafts",
        "",
    ),
    "MTP layers left out": (
        all_of(
            quantize(*TARGET),
            declare(
                quantization_config={
                    "quant_method": "compressed-tensors",
                    "ignore": ["lm_head", "gate", r"re:model\.layers\.1[234]\."],
                }
            ),
        ),
        {},
        "drafts",
        "",
    ),
    "MTP layers renamed": (
        rename("model.layers.12.", "model.language_model.layers.12."),
        {},
        "refuses",
        "29 MTP tensor(s) are named like model.language_model.layers.12.",
    ),
    "names of another family": (
        rename("model.layers.12.", "mtp.layers.0."),
        {},
        "refuses",
        "29 tensor(s) such as mtp.layers.0.",
    ),
    "no target layers": (
        drop(*TARGET),
        {},
        "refuses",
        "config.json says num_hidden_layers = 12, the files have no tensor of model.layers.0",
    ),
    "target renamed": (
        rename("model.", "model.language_model."),
        {},
        "refuses",
        "tensors of the target are named like model.language_model.layers.",
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint(tmp_path: Path, name: str) -> None:
    edit, form, in_vllm, problem = CHECKPOINTS[name]
    write(tmp_path, edit, **{"index": False, **form})
    checkpoint = read_checkpoint(tmp_path)
    problems = [each.text for each in checkpoint.problems]
    assert verdict(checkpoint).startswith(in_vllm)
    assert any(text.startswith(problem) for text in problems) if problem else not problems
    describe(checkpoint)
    in_executor = next((p for p in checkpoint.problems if not p.is_of_vllm), None)
    if in_executor is not None and not any(checkpoint.quantized.values()):
        with pytest.raises(CheckpointError) as caught:
            preflight(tmp_path, max(1, checkpoint.declared))
        assert in_executor.text in str(caught.value)


def test_drafts_by_layers_that_are_not_declared(tmp_path: Path) -> None:
    write(tmp_path, declare(num_nextn_predict_layers=0), index=False)
    with pytest.raises(CheckpointError, match=r"declares no MTP layer\(s\), the files have 3"):
        LLM(tmp_path, speculative_config=MTPDecodingConfig(max_draft_len=1), device="cpu")


def lfs_pointer(path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (path / "model.safetensors").write_text(pointer)


def cut(path: Path) -> None:
    with (path / "model.safetensors").open("r+b") as file:
        file.truncate(1_000_000)


def replace_by_gguf(path: Path) -> None:
    for file in (path / "model.safetensors", path / "config.json"):
        file.unlink()
    (path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (
            lfs_pointer,
            "PATH/model.safetensors: got a git-lfs pointer instead of the file; download it: "
            "git -C PATH lfs pull",
        ),
        (
            lambda path: (path / "adapter_config.json").write_text("{}"),
            "checkpoint PATH: expected a whole checkpoint, adapter_config.json makes it an adapter",
        ),
        (
            replace_by_gguf,
            "checkpoint PATH: expected weights in safetensors files, got model-Q4_K_M.gguf; MTP",
        ),
        (cut, "PATH/model.safetensors: expected a safetensors file, got one that ends before"),
        (
            lambda path: (path / "model.safetensors").write_bytes(struct.pack("<Q", 2**62)),
            "PATH/model.safetensors: expected a safetensors file, got a header of ",
        ),
        (
            lambda path: (path / "config.json").write_text(
                '{"model_type": "glm4_moe", "num_nextn_predict_layers": "1"}'
            ),
            "PATH/config.json: num_nextn_predict_layers: expected an integer of at least 0, got",
        ),
    ],
)
def test_refused_files(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    breaks: Callable[[Path], object],
    message: str,
) -> None:
    write(tmp_path, declare(), index=False)
    breaks(tmp_path)
    assert main(str(tmp_path)) == 1
    shown = capsys.readouterr().out.replace(str(tmp_path), "PATH")
    assert f"problem: {message}" in shown
    assert "refuses to start" in shown
    if "num_nextn" not in message:
        with pytest.raises(CheckpointError) as caught:
            preflight(tmp_path)
        assert str(caught.value).replace(str(tmp_path), "PATH").startswith(message)


@pytest.mark.parametrize(
    ("model_type", "prefix", "names"),
    [
        ("qwen3_5", "", "mtp.fc mtp.pre_fc_norm_embedding mtp.pre_fc_norm_hidden mtp.norm"),
        ("mimo", "model.", "mtp_layers.0.token_layernorm mtp_layers.0.input_proj"),
        ("ernie4_5_moe", "model.", "mtp_emb_norm.0 mtp_hidden_norm.0 mtp_linear_proj.0"),
        ("nemotron_h", "", "mtp.layers.0.enorm mtp.layers.0.eh_proj mtp.layers.1.final_layernorm"),
        ("longcat_flash", "model.", "mtp.norm mtp.layers.0.eh_proj mtp.layers.0.enorm.m"),
        ("deepseek_v4", "", "mtp.0.enorm mtp.0.e_proj mtp.0.h_proj"),
        ("step3p7", "model.", "layers.12.enorm layers.12.transformer.shared_head.norm"),
        ("glm_ocr", "model.language_model.", "layers.12.enorm layers.12.shared_head.norm"),
    ],
)
def test_names_of_families(tmp_path: Path, model_type: str, prefix: str, names: str) -> None:
    """Names of released checkpoints are found, and those that are left out are missing."""
    stored = {f"{prefix}{name}.weight": ("BF16", [1]) for name in names.split()}
    write_file(tmp_path / "model.safetensors", {**stored, "lm_head.weight": ("BF16", [1])})
    config = {"model_type": model_type, "text_config": {"num_hidden_layers": 12}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = read_checkpoint(tmp_path)
    assert set(checkpoint.mtp) == set(stored)
    assert not any("rename" in problem.text for problem in checkpoint.problems)
    first, *_ = stored
    del stored[first]
    write_file(tmp_path / "model.safetensors", {**stored, f"{prefix}x": ("BF16", [1])})
    if read_checkpoint(tmp_path).found:
        assert first in read_checkpoint(tmp_path).differences[0]


@pytest.mark.parametrize("entry", ["model.layers.{}.mlp.gate", r"re:model\.layers\.{}\.mlp\.gate$"])
def test_long_lists_of_layers_that_are_not_quantized(tmp_path: Path, entry: str) -> None:
    """94,000 tensors by 305 entries took 25 s one by one."""
    config = {"quantization_config": {"ignore": [entry.format(layer) for layer in range(305)]}}
    checkpoint = Checkpoint(tmp_path, config, {}, ())
    begin = time.process_time()
    names = [f"model.layers.{n // 1000}.mlp.experts.{n}.up_proj.weight" for n in range(94_000)]
    assert not any(checkpoint.is_skipped(name) for name in names)
    assert time.process_time() - begin < 10
    assert checkpoint.is_skipped("model.layers.304.mlp.gate.weight")


@pytest.mark.parametrize(
    ("entry", "name", "is_skipped"),
    [
        ("lm_head", "lm_head.weight", True),
        ("gate", "model.layers.1.mlp.gate.weight", True),
        ("gate", "model.layers.1.mlp.gate_proj.weight", False),
        ("mlp.gate.", "model.layers.1.mlp.gate.weight", True),
        ("model.layers.1", "model.language_model.layers.1.mlp.up_proj.weight", True),
        ("model.layers.1", "model.layers.12.mlp.up_proj.weight", False),
        ("*self_attn*", "model.layers.1.self_attn.q_proj.weight", True),
        ("layers.*.mlp", "model.layers.1.mlp.up_proj.weight", True),
        ("layers.*.mlp", "model.layers.1.mlps.up_proj.weight", False),
        (r"re:.*\.mlp\.", "model.layers.1.mlp.up_proj.weight", True),
        (r"re:mlp", "model.layers.1.mlp.up_proj.weight", False),
        (r"re:.*\.gate$", "model.layers.1.mlp.gate.weight", True),
        (r"re:layers\.1\.mlp", "model.layers.1.mlp.up_proj.weight", True),
        (r"re:model\.(layers)\.(\d+)\.mlp\.\1", "model.layers.1.mlp.layers.weight", True),
        ("re:(layers", "model.layers.1.mlp.up_proj.weight", False),
    ],
)
def test_entries_of_layers_that_are_not_quantized(
    tmp_path: Path, entry: str, name: str, is_skipped: bool
) -> None:
    others = [r"re:(x)\.(y)", r"re:z", "a*b"]
    config = {"quantization_config": {"ignore": [*others, entry, *others]}}
    assert Checkpoint(tmp_path, config, {}, ()).is_skipped(name) == is_skipped


@pytest.mark.parametrize("pattern", HOSTILE_PATTERNS.values(), ids=HOSTILE_PATTERNS)
def test_patterns_whose_match_does_not_end(tmp_path: Path, pattern: str) -> None:
    config = {"quantization_config": {"ignore": [pattern, "re:lm"]}, "model_type": "glm4_moe"}
    begin = time.process_time()
    checkpoint = Checkpoint(tmp_path, config, {}, ())
    assert not checkpoint.is_skipped(f"model.{'a' * 100}.weight")
    assert checkpoint.is_skipped("lm_head.weight")
    assert time.process_time() - begin < 5
    is_reported = any("pattern(s) of the quantization" in each.text for each in checkpoint.problems)
    assert is_reported == ("{" not in pattern)
    with pytest.raises(CheckpointError, match="take too long: expected names of up to 128"):
        checkpoint.is_skipped("a" * 129)


def test_a_broken_file_of_something_else(tmp_path: Path) -> None:
    """Without the MTP tensors in the other files, theirs may be in it."""
    write(tmp_path, declare(), shards=2, index=True)
    (tmp_path / "vision.safetensors").write_bytes(b"cut")
    assert not read_checkpoint(tmp_path).problems
    for file in tmp_path.glob("model*"):
        file.unlink()
    write(tmp_path, drop(*LAYERS), shards=2, index=True)
    with pytest.raises(CheckpointError, match=r"vision\.safetensors: expected a safetensors file"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(("given", "shown"), [([5, 6], "5, 6"), (None, "0")])
def test_stop_ids_of_the_generation_config_go_first(
    tmp_path: Path, given: object, shown: str
) -> None:
    write(tmp_path, declare(eos_token_id=0), index=False)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    assert dict(describe(read_checkpoint(tmp_path)))["vocabulary"].endswith(f"stop ids {shown}")


def test_files_that_are_no_files(tmp_path: Path) -> None:
    """Neither JSON nor safetensors are read from pipes, which may never end."""
    write(tmp_path, declare(), index=False)
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        with pytest.raises(CheckpointError) as caught:
            read_checkpoint(tmp_path)
        reason = "cannot be read: expected a regular file, got a pipe or a device"
        assert str(caught.value) == f"{tmp_path / name}: {reason}"


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (declare(), "vanilla: 3 MTP layers draft one token each, max_draft_len at most 3"),
        (
            all_of(drop(*LAYERS[1:]), declare(num_nextn_predict_layers=1)),
            "eagle: the MTP layer drafts every token, max_draft_len is free",
        ),
        (drop(*LAYERS), "no MTP layers to draft with"),
    ],
)
def test_the_doctor_of_tensorrt_llm(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    edit: Edit,
    expected: str,
) -> None:
    found = tensorrt_llm_checks.Examination("1.3b", "1.3", {"1.3b": []})
    monkeypatch.setattr(tensorrt_llm_check, "examine", lambda: found)
    write(tmp_path, edit, index=False)
    monkeypatch.setattr("sys.argv", ["", "doctor", "--host=tensorrt_llm", "-m", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli_main()
    lines = capsys.readouterr().out.splitlines()
    assert f"TensorRT-LLM   {expected}" in lines
    mode = expected.partition(":")[0]
    if mode in ("eagle", "vanilla"):
        assert lines[-1].endswith(f"{tmp_path} --config configs/trtllm/1.3b_{mode}.yaml")
        assert ended.value.code == 0
    else:
        assert lines[-1].endswith(f"--model {tmp_path}  # with this corrected")
        assert any(line.startswith(f"problem: {NO_MTP}") for line in lines)
        assert ended.value.code == 1


def test_the_doctor_of_vllm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Large vocabularies get a hint, and the last line serves the checkpoint."""
    monkeypatch.setattr(model_check, "examine", lambda: Examination("0.33.0", tested_on="CPU"))
    monkeypatch.setattr(extras, "version_of", lambda _: "0.33.0")
    monkeypatch.setattr(model_check, "LARGE_VOCABULARY", 2048)
    assert main(str(TINY)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == (
        f"next: vllm serve {TINY} --speculative-config "
        '\'{"method": "mtp", "num_speculative_tokens": 3}\' --additional-config '
        '\'{"mtp_plugin": {"thinking_begin_token": 1, "thinking_end_token": 2}}\''
    )
    assert any(line.startswith("hint ") and "draft_vocab" in line for line in lines)


@pytest.mark.parametrize("text", HOSTILE_TEXT.values(), ids=HOSTILE_TEXT)
@pytest.mark.parametrize("form", ["vllm", "tensorrt_llm", "embedded"])
def test_text_of_a_checkpoint_forges_no_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    form: str,
    text: str,
) -> None:
    method = {"quant_method": text, "fmt": text}
    folder = tmp_path / "a\nnext: rm"
    folder.mkdir()
    arguments = ["", "doctor", "--model", str(folder)]
    monkeypatch.setattr(
        "sys.argv", arguments if form == "embedded" else [*arguments, "--host", form]
    )
    for values in (
        {"model_type": text, "tie_word_embeddings": text, "vocab_size": text},
        {"architectures": [text], "quantization_config": method, text: 1, "eos_token_id": text},
    ):
        write(folder, all_of(declare(**values), quantize("lm_head", *TARGET)), index=False)
        with pytest.raises(SystemExit):
            cli_main()
        lines = capsys.readouterr().out.split("\n")
        assert lines.pop() == ""
        assert all(line.isprintable() and len(line) < 3 * LONGEST_LINE for line in lines)
        assert [line.startswith("next:") for line in lines] == [*[False] * (len(lines) - 1), True]
        assert "rm -rf" not in lines[-1]
