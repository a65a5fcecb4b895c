"""``mtp-plugin doctor --host tensorrt_llm --config FILE``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtp_plugin.hosts.tensorrt_llm import checks, file_check
from tests.config.test_host_keys import DEPLOYED as KEYS_OF_DEPLOYMENTS
from tests.config.test_trtllm_files import CLASSES, FILES, LINES, recorded_keys

SPEC = "speculative_config: {decoding_type: MTP, max_draft_len: 3}"
DEPLOYED = """
tensor_parallel_size: 32
moe_expert_parallel_size: 32
enable_attention_dp: true
moe_config: {backend: CUTEDSL, use_low_precision_moe_combine: true}
kv_cache_config: {enable_block_reuse: false, dtype: fp8}
cache_transceiver_config: {backend: NIXL, max_tokens_in_buffer: 8448}
stream_interval: 20
speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 3}
"""


@pytest.fixture(autouse=True)
def _without_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)


def checked(file: Path, text: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    file.write_text(text)
    code = file_check.main(str(file))
    return code, capsys.readouterr().out.splitlines()


def test_a_file_for_many_gpus_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = checked(tmp_path / "f.yaml", DEPLOYED, capsys)
    assert code == checks.OK
    assert lines[0] == "drafts         MTP, K 3"
    assert lines[-1].endswith(f"trtllm-serve CHECKPOINT --config {tmp_path}/f.yaml")


def test_keys_of_real_deployments_are_known() -> None:
    file: dict[str, Any] = {}
    for path in yaml.safe_load(KEYS_OF_DEPLOYMENTS):
        *sections, name = path.split(".")
        place = file
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = "MTP" if name == "decoding_type" else None
    assert len(file) > 30
    (older,) = file_check.unknown_keys(file)
    assert older.startswith("cuda_graph_config.cuda_graph_batch_sizes: not a key of TensorRT-LLM")
    assert older.endswith("; did you mean batch_sizes?")


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_our_own_files_pass(file: Path) -> None:
    assert file_check.main(str(file)) == checks.OK


@pytest.mark.parametrize("line", LINES)
def test_every_recorded_key_is_known(line: str) -> None:
    for section in CLASSES:
        known = file_check.KNOWN["" if section == "top" else section]
        assert recorded_keys(line, section) <= known


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- a", "{file}: expected a mapping of keys to values, got a list"),
        (f"{SPEC}\nstream_intervl: 2", "stream_intervl: not a key of TensorRT-LLM 1.2 to 1.4; did "
         "you mean stream_interval?"),
        (f"{SPEC}\ndevice: cuda", "device: not a key of TensorRT-LLM 1.2 to 1.4"),
        (SPEC.replace("}", ", mtp: {}}"), "speculative_config.mtp: TensorRT-LLM does not know it; "
         "write its keys to a file that TRTLLM_MTP_PLUGIN_CONFIG names"),
        (f"{SPEC}\nenable_attention_dp: true\nenable_lm_head_tp_in_adp: true",
         "enable_lm_head_tp_in_adp: refused when the model is built, as it splits the draft head "
         "between the ranks; write false, which changes no output"),
        (f"{SPEC}\npipeline_parallel_size: 2", "pipeline_parallel_size: pipeline parallelism is "
         "refused when the model is built; expected 1, got 2"),
        (f"{SPEC}\nguided_decoding_backend: xgrammar",
         "guided_decoding_backend: grammars are not served with drafts; leave it out"),
        (SPEC.replace("}", ", use_sa_spec: true}"),
         "speculative_config.use_sa_spec: not served by mtp_plugin; expected false, got true"),
        (SPEC.replace("}", ", relaxed_topk: 0}"), "speculative_config.relaxed_topk: Input should "
         "be greater than or equal to 1, got 0"),
        (SPEC.replace("}", ", use_rejection_sampling: true}"),
         "speculative_config: use_rejection_sampling: not served inside TensorRT-LLM, which pads "
         "drafts with tokens that were not sampled; leave it out: coupled verification serves "
         "sampled requests"),
    ],
)  # fmt: skip
def test_problem(
    text: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "f.yaml"
    code, lines = checked(file, text, capsys)
    assert code == checks.PROBLEM
    found = [line for line in lines if line.startswith("problem: ")]
    assert found == [f"problem: {problem.format(file=file) if '{file}' in problem else problem}"]
    assert lines[-1].endswith(f"--config {file}  # with this corrected")


@pytest.mark.parametrize(
    "text", ["backend: pytorch", "speculative_config: {decoding_type: Eagle, speculative_model: m}"]
)
def test_a_file_that_the_plugin_does_not_serve(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = checked(tmp_path / "f.yaml", text, capsys)
    assert code == checks.OK
    assert lines[0].endswith("mtp_plugin is not used")
