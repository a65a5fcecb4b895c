"""``config``, ``doctor``, ``--version`` and ``--help``."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from mtp_plugin.checkpoint.vllm_command import vllm_command
from mtp_plugin.config import json_schema, load_config
from mtp_plugin.speculative.plugin import registry
from tests.cli.calls import EAGLE, VANILLA, VOCAB, Run


def test_config_prints_what_loads_again(
    run: Run, config: Callable[..., str], checkpoint: Path, tmp_path: Path
) -> None:
    file = config({"decoding_type": "MTP", "use_mtp_vanilla": True})
    result = run("config", file)
    assert result.code == 0
    again = tmp_path / "again.yaml"
    again.write_text(result.out)
    loaded = load_config(again)
    assert loaded == load_config(file).resolve(3)
    assert loaded.speculative_config.draft_len == 3
    assert loaded.model == str(checkpoint)


def test_config_of_a_checkpoint_elsewhere(
    run: Run, config: Callable[..., str], tmp_path: Path
) -> None:
    result = run("config", config(EAGLE, model=str(tmp_path / "elsewhere")))
    assert result.code == 0
    assert yaml.safe_load(result.out)["speculative_config"]["max_draft_len"] == 3
    assert result.err.startswith("warning: draft length not looked up in the checkpoint: ")


def test_config_with_another_checkpoint(
    run: Run, config: Callable[..., str], checkpoint: Path, tmp_path: Path
) -> None:
    file = config(EAGLE, model=str(tmp_path / "elsewhere"))
    result = run("config", file, "--model", str(checkpoint))
    assert (result.code, result.err) == (0, "")
    assert yaml.safe_load(result.out)["model"] == str(checkpoint)


def test_config_with_an_older_name_warns(run: Run, config: Callable[..., str]) -> None:
    result = run("config", config({"decoding_type": "MTP", "num_nextn_predict_layers": 2}))
    assert result.code == 0
    assert yaml.safe_load(result.out)["speculative_config"]["max_draft_len"] == 2
    assert re.fullmatch(r"warning: .*num_nextn_predict_layers is the older name .*\n", result.err)


def test_config_schema(run: Run) -> None:
    assert json.loads(run("config", "--schema").out) == json_schema()


def test_doctor_finds_no_problem(run: Run, config: Callable[..., str]) -> None:
    result = run("doctor", "-c", config(VANILLA))
    assert result.code == 0
    found = dict(re.findall(r"^(\S+(?: \S+)*) {2,}(.*)$", result.out, re.MULTILINE))
    assert found["family"] == "glm4_moe (Glm4MoeForCausalLM)"
    assert found["layers"] == "2 and 3 MTP"
    assert found["drafts per step"] == "K = 3 by 3 MTP layers"
    assert found["KV rows per request"].startswith("its tokens and up to 8 for the next step")
    assert found["KV blocks"] == "256 of 8 tokens"
    assert found["slots"] == "26 and the sentinel"
    assert found["tokenizer"] == f"{VOCAB} tokens"
    assert found["draft head"].startswith("concat embed_hidden, target state post_norm")
    assert result.out.splitlines()[-2:] == [
        "no problems found",
        f"next: mtp-plugin generate --config {config(VANILLA)} --prompt 'Once upon a time'",
    ]


def next_of(run: Run, *arguments: str) -> str:
    """The last line of ``doctor`` without its beginning."""
    last = run("doctor", *arguments).out.splitlines()[-1]
    assert last.startswith("next: ")
    return last.removeprefix("next: ")


def test_doctor_ends_with_a_command_for_other_models(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    odd = tmp_path / "odd"
    shutil.copytree(checkpoint, odd)
    content = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(content | {"model_type": "qwen3_5"}))
    assert next_of(run, str(odd)) == next_of(run, "-m", str(odd)) == vllm_command(odd)
    (odd / "config.json").write_text(json.dumps(content | {"num_key_value_heads": 3}))
    corrected = f"mtp-plugin doctor --model {odd}  # with this corrected"
    assert next_of(run, "-m", str(odd)) == corrected
    (odd / "config.json").write_text(json.dumps(content))
    (odd / "tokenizer.json").unlink()
    assert next_of(run, "-m", str(odd)) == f"mtp-plugin tune --host embedded --model {odd}"


def test_doctor_ends_with_a_prompt_in_the_form_of_the_chat_template(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    chat, prompt = tmp_path / "chat", "User's: Once upon a time\\n<think>"
    shutil.copytree(checkpoint, chat)
    (chat / "chat_template.jinja").write_text("User's: {{ messages[-1].content }}\n<think>")
    escaped = prompt.replace("'", "\\'")
    assert next_of(run, "-m", str(chat)).endswith(f" --prompt $'{escaped}'")
    (chat / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    assert next_of(run, "-m", str(chat)).endswith(" --prompt 'Once upon a time'")


def test_doctor_ends_with_a_command_where_nothing_can_be_read(
    run: Run, config: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    download = "hf download org/Model-1.5 --local-dir org/Model-1.5"
    assert next_of(run, "-m", "org/Model-1.5") == download
    file = config(EAGLE, max_batch_size=0)
    assert next_of(run, "-c", file) == f"mtp-plugin doctor --config {file}  # with this corrected"
    file = config(EAGLE, tensor_parallel_size=8)
    assert next_of(run, "-c", file) == f"mtp-plugin doctor --host tensorrt_llm --config {file}"


def test_doctor_of_a_checkpoint_without_its_mtp_weights(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    """The command that it ends with runs."""
    saved = tmp_path / "saved"
    shutil.copytree(checkpoint, saved)
    tensors = load_file(saved / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if not re.match(r"model\.layers\.[2-9]", name)}
    save_file(kept, saved / "model.safetensors", {"format": "pt"})
    command = f"mtp-plugin generate --model {saved} --no-mtp"
    assert next_of(run, "-m", str(saved)) == command
    result = run(*shlex.split(command)[1:], "-p", "ab", "-n", "4")
    assert result.code == 0, result.err
    assert "acceptance" not in result.out
    assert next_of(run, "-m", str(saved), "--no-mtp") == f"{command} --prompt 'Once upon a time'"


def test_doctor_reports_a_cut_draft_vocabulary(
    run: Run, config: Callable[..., str], tmp_path: Path
) -> None:
    """How much is left of it, and what is wrong with its file, which needs no weight either.

    Stop ids and thinking tags of the checkpoint are added to the three ids of the file.
    """
    ids = tmp_path / "ids.json"
    ids.write_text("[5, 3, 9]")
    file = config({**EAGLE, "mtp": {"draft_vocab": str(ids)}})
    result = run("doctor", "-c", file)
    assert result.code == 0
    assert re.search(rf"^draft vocabulary +6 of {VOCAB} ids$", result.out, re.MULTILINE)
    assert "draft vocabulary" not in run("doctor", "-c", config(EAGLE)).out
    for content, message in (
        ("[5, 5]", "expected every id once, got 5 more than once"),
        (f"[{VOCAB}]", f"expected ids of the vocabulary of {VOCAB}, got {VOCAB}"),
    ):
        ids.write_text(content)
        result = run("doctor", "-c", config({**EAGLE, "mtp": {"draft_vocab": str(ids)}}))
        assert result.code == 1
        assert f"problem: mtp.draft_vocab: {ids}: {message}" in result.out.replace("\n", "")


def test_doctor_loads_no_weight(
    run: Run, config: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("mtp_plugin.hosts.embedded.models.loader.read_tensors", refuse)
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", refuse)
    assert run("doctor", "-c", config(EAGLE)).code == 0
    assert run("doctor", "-c", config(None)).code == 0


def test_doctor_lists_every_problem(run: Run, config: Callable[..., str]) -> None:
    file = config(
        {**VANILLA, "max_draft_len": 4},
        max_seq_len=9999,
        kv_cache_config={"tokens_per_block": 64, "max_tokens": 63},
    )
    result = run("doctor", "-c", file)
    assert result.code == 1
    problems = [p for p in result.out.splitlines() if p.startswith("problem: ")]
    assert [p.split(": ")[1] for p in problems] == [
        "kv_cache_config.max_tokens",
        "max_draft_len",
        "max_seq_len",
    ]
    assert "no problems found" not in result.out


def test_doctor_names_a_plugin_whose_import_ends_the_process(
    run: Run,
    config: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "exiting_module.py").write_text("raise SystemExit('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("EXITING", "exiting_module:Plugin", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda **_: [point])
    result = run("doctor", "-c", config({"decoding_type": "EXITING"}))
    assert result.code == 1
    expected = (
        "problem: entry point 'EXITING' of mtp_plugin.plugins (exiting_module:Plugin) cannot be "
        "loaded: SystemExit: no licence"
    )
    assert expected in result.out


def test_doctor_of_a_drafter_without_mtp_layers(
    run: Run, config: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "integration.examples.ngram.plugin:NgramPlugin"
    point = EntryPoint("NGRAM_TEST", name, registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda **_: [point])
    result = run("doctor", "-c", config({"decoding_type": "NGRAM_TEST", "max_draft_len": 3}))
    assert "K = 3 by a drafter without MTP layers" in result.out


def test_doctor_on_a_damaged_checkpoint(
    run: Run, config: Callable[..., str], checkpoint: Path, tmp_path: Path
) -> None:
    """R43: a missing MTP tensor is found before any weight is loaded."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.layers.3.eh_proj.weight"]
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    result = run("doctor", "-c", config(EAGLE, model=str(broken)))
    assert result.code == 1
    assert "are missing: model.layers.3.eh_proj.weight" in result.out
    assert re.search(r"^tokenizer +none: prompts must be token ids$", result.out, re.MULTILINE)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", {"num_hidden_layers": 999}, "config.json says num_hidden_layers = 999"),
        ("config.json", {"hidden_act": 5}, "hidden_act: expected one of 'silu'"),
        ("generation_config.json", {"eos_token_id": -1}, "eos_token_id: expected ids below"),
        ("tokenizer_config.json", {"tokenizer_class": 5}, "tokenizer_class: expected text or null"),
    ],
)
def test_doctor_names_what_generate_refuses(
    run: Run,
    config: Callable[..., str],
    checkpoint: Path,
    tmp_path: Path,
    file: str,
    content: dict[str, Any],
    message: str,
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(checkpoint, bad)
    changed = {**json.loads((bad / file).read_text()), **content}
    (bad / file).write_text(json.dumps(changed))
    options = config(EAGLE, model=str(bad))
    found = run("doctor", "-c", options)
    assert found.code == 1
    refused = run("generate", "-c", options, "-p", "ab", "-n", "2")
    assert refused.code == 2
    (line,) = [line for line in refused.err.splitlines() if message in line]
    assert f"problem: {line.removeprefix('error: ')}" in found.out


def test_keys_on_which_transformers_would_act_are_reported(
    run: Run, config: Callable[..., str], checkpoint: Path, tmp_path: Path
) -> None:
    odd = tmp_path / "odd"
    shutil.copytree(checkpoint, odd)
    content = json.loads((odd / "config.json").read_text())
    content |= {"attn_implementation": "org/kernel", "seq_aux": True}
    (odd / "config.json").write_text(json.dumps(content))
    found = run("doctor", "-c", config(EAGLE, model=str(odd)))
    assert found.code == 0
    assert "not read: attn_implementation, seq_aux" in found.out
    decoded = run("generate", "-c", config(EAGLE, model=str(odd)), "-p", "ab", "-n", "2")
    assert decoded.code == 0


def test_doctor_without_a_checkpoint_or_a_readable_config(
    run: Run, config: Callable[..., str], tmp_path: Path
) -> None:
    result = run("doctor", "-c", config(EAGLE, model=str(tmp_path / "none")))
    assert result.code == 1
    assert "problem: checkpoint" in result.out
    result = run("doctor", "-c", config(EAGLE, max_batch_size=0, nonsense=1))
    assert result.code == 1
    assert result.out.count("problem: ") == 2


def test_version_and_help(run: Run) -> None:
    assert re.fullmatch(r"mtp-plugin \d+\.\d+\.\d+\n", run("--version").out)
    result = run("--help")
    assert result.code == 0
    assert all(command in result.out for command in ("doctor", "draft-vocab", "tune"))
    assert "..." not in result.out.partition("Commands:")[2]
