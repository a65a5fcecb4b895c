"""Broken forms of a checkpoint: what `doctor --host vllm` and the embedded executor report."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtp_plugin import LLM, extras
from mtp_plugin.__main__ import main as cli_main
from mtp_plugin.checkpoint import IN_VLLM, Checkpoint, describe, read_checkpoint
from mtp_plugin.checkpoint.skipped import Skipped
from mtp_plugin.config import MTPDecodingConfig
from mtp_plugin.errors import LONGEST_LINE, CheckpointError
from mtp_plugin.hosts.embedded.models import preflight
from mtp_plugin.hosts.tensorrt_llm import checks as tensorrt_llm_checks
from mtp_plugin.hosts.tensorrt_llm import model_check as tensorrt_llm_check
from mtp_plugin.hosts.vllm import model_check
from mtp_plugin.hosts.vllm.checks import Examination
from mtp_plugin.hosts.vllm.model_check import main, verdict
from tests.checkpoint.forms import (
    CHECKPOINTS,
    LAYERS,
    LEFT_OUT,
    NO_MTP,
    TARGET,
    TINY,
    Edit,
    all_of,
    declare,
    drop,
    quantize,
    write,
    write_file,
)
from tests.hostile import HOSTILE, HOSTILE_PATTERNS, HOSTILE_TEXT


def verdict_of(path: Path) -> tuple[str, list[str]]:
    """Return what vLLM will do, and the problems."""
    try:
        checkpoint = read_checkpoint(path)
        describe(checkpoint)
        return verdict(checkpoint), [each.text for each in checkpoint.problems]
    except CheckpointError as error:
        return IN_VLLM["refusal"], [str(error).replace(str(path), "PATH")]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint(tmp_path: Path, name: str) -> None:
    edit, form, in_vllm, problem = CHECKPOINTS[name]
    write(tmp_path, edit, **form)
    found, problems = verdict_of(tmp_path)
    assert found.startswith(in_vllm)
    assert problem in "\n".join(problems)
    assert bool(problem) == bool(problems)
    if problem.startswith("PATH"):
        return
    checkpoint = read_checkpoint(tmp_path)
    assert ("warning" in dict(describe(checkpoint))) == ("two files" in name)
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
        ("glm5_next", "model.language_model.", "layers.12.enorm layers.12.shared_head.norm"),
        ("kimi_k3", "language_model.model.", "layers.12.enorm layers.12.shared_head.norm"),
        ("dots3_note", "model.", "layers.12.eh_proj layers.12.shared_head.norm"),
        ("hy_v4", "model.", "mtp_layers.0.eh_proj mtp_layers.0.final_layernorm"),
        ("qwen4_exp", "", "mtp.fc_hidden mtp.pre_fc_norm_embedding mtp.layers.0.input_layernorm"),
        ("interns2_mobius", "", "mtp.fc mtp.norm mtp.layers.0.input_layernorm"),
        ("nemotron_h_puzzle", "", "mtp.layers.0.enorm mtp.layers.1.final_layernorm"),
        ("inkling_model", "model.", "mtp.layers.0.input_proj mtp.layers.0.embed_norm"),
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
    assert not any(checkpoint.skipped.holds(name) for name in names)
    assert time.process_time() - begin < 10
    assert checkpoint.skipped.holds("model.layers.304.mlp.gate.weight")


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
    assert Checkpoint(tmp_path, config, {}, ()).skipped.holds(name) == is_skipped


@pytest.mark.parametrize(("method", "entry", "module", "is_left_out"), LEFT_OUT)
def test_entries_by_the_rule_of_a_method(
    method: str, entry: str, module: str, is_left_out: bool
) -> None:
    key = {"compressed-tensors": "ignore"}.get(method, "modules_to_not_convert")
    lists = {"dynamic": {entry: {}}} if method == "gptq" else {key: [entry]}
    assert Skipped({"quant_method": method, **lists}).holds(f"{module}.weight") == is_left_out


@pytest.mark.parametrize("method", ["fp8", "awq", "compressed-tensors", "gptq"])
def test_long_lists_by_the_rule_of_a_method(method: str) -> None:
    """As many entries as a mixture of experts has modules."""
    names = [f"model.layers.{n // 768}.mlp.experts.{n % 768}.up_proj" for n in range(46_080)]
    lists = {"ignore": names, "modules_to_not_convert": names}
    skipped, begin = Skipped({"quant_method": method, **lists}), time.process_time()
    others = [f"{name.replace('mlp', 'moe')}.weight" for name in names]
    assert not any(skipped.holds(name) for name in others)
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("pattern", HOSTILE_PATTERNS.values(), ids=HOSTILE_PATTERNS)
def test_patterns_whose_match_does_not_end(tmp_path: Path, pattern: str) -> None:
    config = {"quantization_config": {"ignore": [pattern, "re:lm"]}, "model_type": "glm4_moe"}
    begin = time.process_time()
    checkpoint = Checkpoint(tmp_path, config, {}, ())
    assert not checkpoint.skipped.holds(f"model.{'a' * 100}.weight")
    assert checkpoint.skipped.holds("lm_head.weight")
    assert time.process_time() - begin < 5
    is_reported = any("pattern(s) of the quantization" in each.text for each in checkpoint.problems)
    assert is_reported == ("{" not in pattern)
    with pytest.raises(CheckpointError, match="take too long: expected names of up to 128"):
        checkpoint.skipped.holds("a" * 129)


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


@pytest.mark.parametrize("is_installed", [False, True])
def test_the_doctor_of_vllm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_installed: bool
) -> None:
    """Large vocabularies get a hint, and the last line serves the checkpoint, also elsewhere."""
    monkeypatch.setattr(model_check, "find_spec", lambda _: is_installed or None)
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
    assert (model_check.NOT_HERE in lines) != is_installed


@pytest.mark.parametrize(
    "name", ["model.layers.{}.x.weight", "model.layers.3.e{}.experts.0.up_proj.weight"]
)
def test_headers_of_many_layers_and_experts(tmp_path: Path, name: str) -> None:
    config = {"model_type": "glm4_moe", "num_hidden_layers": 2, "n_routed_experts": 2**16}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    tensors = {name.format(n): ("BF16", [1]) for n in range(20_000)}
    write_file(tmp_path / "model.safetensors", tensors)
    begin = time.process_time()
    assert main(str(tmp_path)) == 1
    assert time.process_time() - begin < 10


def is_json(value: Any) -> bool:
    try:
        return bool(json.dumps(value))
    except Exception:  # whatever a hostile value raises
        return False


@pytest.mark.parametrize("value", [v for v in HOSTILE.values() if is_json(v)])
def test_hostile_values_of_a_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: Any
) -> None:
    write(tmp_path, declare())
    config = json.loads((tmp_path / "config.json").read_text())
    lists = dict.fromkeys(("ignore", "modules_to_not_convert", "dynamic"), value)
    for values in (
        {"hidden_size": value, "vocab_size": value},
        {"text_config": value, "tie_word_embeddings": value},
        {"quantization_config": {"quant_method": value, "ignore": [value]}},
        {"quantization_config": {"quant_method": "fp8", "ignored_layers": [value], **lists}},
        {"quantization_config": {"quant_method": "gptq", "modules_in_block_to_quantize": value}},
        {"quantization_config": {"quant_method": "compressed-tensors", **lists}},
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **values}))
        assert main(str(tmp_path)) in (0, 1)
    assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())


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
