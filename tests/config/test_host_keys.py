"""Keys of TensorRT-LLM's: set aside with one line where they change nothing, else refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtp_plugin.config import (
    CudaGraphConfig,
    KVCacheConfig,
    KvCacheConfig,
    LLMConfig,
    MTPDecodingConfig,
    OtherDecodingConfig,
    host_keys,
    json_schema,
    load_config,
    parse_config,
)
from mtp_plugin.config.host_keys import HostKey
from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.tensorrt_llm.config import decoding_config_class

SECTIONS: dict[str, Mapping[str, HostKey]] = {
    "": host_keys.TOP_LEVEL_OF_ALL,
    "kv_cache_config": host_keys.KV_CACHE,
    "cuda_graph_config": host_keys.CUDA_GRAPHS,
    "speculative_config": host_keys.SPECULATIVE,
}
EVERY_KEY = [
    (section, name, f"{section}.{name}" if section else name)
    for section, keys in SECTIONS.items()
    for name in keys
]
EXAMPLES: dict[str, list[Any]] = {
    "boolean": [True, False],
    "integer": [0, 3],
    "number": [0.5],
    "string": ["any"],
    "object": [{}, {"any": 1}],
}


def file_with(section: str, name: str, value: Any) -> dict[str, Any]:
    """A config with one key more."""
    spec: dict[str, Any] = {"decoding_type": "MTP", "max_draft_len": 3}
    file: dict[str, Any] = {"model": "m", "speculative_config": spec}
    place = file if not section else file.setdefault(section, {})
    place[name] = value
    return file


def without_key(section: str, name: str) -> dict[str, Any]:
    file = file_with(section, name, None)
    del (file[section] if section else file)[name]
    return file


def refusal(mapping: Mapping[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(mapping, "f.yaml")
    return str(caught.value)


def test_values_without_effect_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    for section, name, path in EVERY_KEY:
        key = SECTIONS[section][name]
        examples = [value for kind in key.types for value in EXAMPLES[kind]]
        values = [{}] if key.inside is not None else [*key.values, *examples]
        assert values
        without = parse_config(without_key(section, name))
        for value in values:
            caplog.clear()
            assert parse_config(file_with(section, name, value)) == without
            assert caplog.messages == [f"<mapping>: set aside, as they change no output: {path}"]


def test_values_with_an_effect_are_refused_by_name() -> None:
    for section, name, path in EVERY_KEY:
        for value in (["a list"], 1.5):
            if "number" not in SECTIONS[section][name].types or isinstance(value, list):
                message = refusal(file_with(section, name, value))
                assert message.startswith(f"f.yaml: {path}: ")
                assert len(message.splitlines()) == 1


def test_one_line_of_the_log_names_all(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        config = parse_config(
            {
                "model": "m",
                "backend": "pytorch",
                "attn_backend": "TRTLLM",
                "kv_cache_config": {"dtype": "auto", "tokens_per_block": 16},
                "speculative_config": {"decoding_type": "MTP", "mtp_eagle_one_model": True},
            },
            "f.yaml",
        )
    assert config.attn_backend == "auto"
    assert config.kv_cache_config.tokens_per_block == 16
    assert caplog.messages == [
        "f.yaml: set aside, as they change no output: backend, attn_backend, "
        "kv_cache_config.dtype, speculative_config.mtp_eagle_one_model"
    ]


def test_mistakes_in_host_keys_come_together_with_others() -> None:
    expected_value = refusal(
        {"model": "m", "tensor_parallel_size": 2, "max_batch_size": 0, "backend": None}
    )
    assert [line.split(": ")[1] for line in expected_value.splitlines()[:-1]] == [
        "max_batch_size",
        "tensor_parallel_size",
    ]


def test_nothing_is_reported_of_a_file_without_such_keys(caplog: pytest.LogCaptureFixture) -> None:
    parse_config({"model": "m", "attn_backend": "sdpa", "cuda_graph_config": {}})
    assert caplog.messages == []


def test_sizes_with_their_largest_are_taken() -> None:
    graphs = {"batch_sizes": [1, 4], "max_batch_size": 4}
    config = parse_config({"model": "m", "cuda_graph_config": graphs})
    assert config.cuda_graph_config == CudaGraphConfig(batch_sizes=(1, 4), max_batch_size=4)


# what files of real deployments hold, with their frequent values
DEPLOYED = """
max_batch_size: [4]
max_num_tokens: [64]
max_seq_len: [64]
tensor_parallel_size: [1, 8]
moe_expert_parallel_size: [1, 8]
enable_attention_dp: [false, true]
pipeline_parallel_size: [1]
print_iter_log: [true]
moe_config.backend: [TRTLLM, CUTEDSL, CUTLASS]
kv_cache_config.enable_block_reuse: [false, true]
kv_cache_config.free_gpu_memory_fraction: [0.8]
kv_cache_config.dtype: [auto, fp8]
speculative_config.decoding_type: [MTP]
cache_transceiver_config.backend: [UCX]
cache_transceiver_config.max_tokens_in_buffer: [8448]
cache_transceiver_config.kv_transfer_timeout_ms: [60000]
cache_transceiver_config.transceiver_runtime: [PYTHON]
speculative_config.num_nextn_predict_layers: [3]
cuda_graph_config.enable_padding: [true, false]
stream_interval: [10, 20, 100]
num_postprocess_workers: [4]
moe_config.use_low_precision_moe_combine: [true]
cuda_graph_config.batch_sizes: [[1, 2]]
enable_lm_head_tp_in_adp: [false, true]
disable_overlap_scheduler: [true, false]
nvfp4_gemm_config.allowed_backends: [[cutlass]]
allreduce_strategy: [AUTO, MNNVL]
trust_remote_code: [true]
enable_iter_perf_stats: [false, true]
speculative_config.max_draft_len: [3]
cuda_graph_config.max_batch_size: [4]
enable_chunked_prefill: [true, false]
enable_iter_req_stats: [false]
kv_cache_config.event_buffer_max_size: [0, 1024]
kv_cache_config.tokens_per_block: [32]
return_perf_metrics: [false]
scheduler_config.capacity_scheduler_policy: [MAX_UTILIZATION]
scheduler_config.context_chunking_policy: [FIRST_COME_FIRST_SERVED]
kv_cache_config.host_cache_size: [0, 1024]
sparse_attention_config.algorithm: [dsa]
backend: [pytorch]
moe_config.load_balancer.num_slots: [288]
speculative_config.use_mtp_vanilla: [false]
custom_tokenizer: [deepseek_v4]
attention_dp_config.enable_balance: [true]
num_serve_frontends: [1, 4]
cuda_graph_config.cuda_graph_batch_sizes: [[1, 2]]
speculative_config.draft_lm_head_dtype: [bfloat16]
speculative_config.draft_moe_dtype: [fp8]
speculative_config.use_sa_spec: [false, true]
moe_config.moe_tactic: [1]
pytorch_backend_config: [{}, {enable_overlap_scheduler: true}]
build_config: [null, {max_batch_size: 4}]
hostname: [localhost]
port: [8000]
"""
WITH_AN_EFFECT = """
tensor_parallel_size: 8
moe_expert_parallel_size: 8
enable_attention_dp: true
kv_cache_config.dtype: fp8
cache_transceiver_config.backend: UCX
cache_transceiver_config.max_tokens_in_buffer: 8448
cache_transceiver_config.kv_transfer_timeout_ms: 60000
cache_transceiver_config.transceiver_runtime: PYTHON
enable_lm_head_tp_in_adp: true
kv_cache_config.event_buffer_max_size: 1024
scheduler_config.capacity_scheduler_policy: MAX_UTILIZATION
scheduler_config.context_chunking_policy: FIRST_COME_FIRST_SERVED
kv_cache_config.host_cache_size: 1024
sparse_attention_config.algorithm: dsa
moe_config.load_balancer.num_slots: 288
custom_tokenizer: deepseek_v4
num_serve_frontends: 4
speculative_config.use_sa_spec: true
pytorch_backend_config: {enable_overlap_scheduler: true}
build_config: {max_batch_size: 4}
"""


@pytest.mark.filterwarnings("ignore:.*num_nextn_predict_layers")
def test_keys_of_real_deployments_are_known() -> None:
    refused = {}
    for path, values in yaml.safe_load(DEPLOYED).items():
        for value in values:
            *sections, name = path.split(".")
            file = place = file_with("", "max_batch_size", 4)
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = value
            try:
                parse_config(file)
            except ConfigError as error:
                refused[path] = "unknown" if "unknown key" in str(error) else value
    assert refused == yaml.safe_load(WITH_AN_EFFECT)


def test_another_plugins_options_are_left_alone() -> None:
    spec = {"decoding_type": "Toy", "load_format": None, "use_dynamic_tree": False}
    config = parse_config({"model": "m", "speculative_config": spec})
    assert config.speculative_config == OtherDecodingConfig(
        "Toy", {"load_format": None, "use_dynamic_tree": False}
    )


def test_parts_made_in_python_are_taken_as_they_are() -> None:
    parts = {"kv_cache_config": KVCacheConfig(), "speculative_config": MTPDecodingConfig()}
    assert parse_config({"model": "m", **parts}) == LLMConfig(model="m", **parts)


def test_parts_made_in_python_set_theirs_aside(caplog: pytest.LogCaptureFixture) -> None:
    part = KvCacheConfig(enable_block_reuse=True, max_tokens=64)  # type: ignore[call-arg]
    assert part == KVCacheConfig(max_tokens=64)
    assert caplog.messages == [
        "KVCacheConfig: set aside, as they change no output: enable_block_reuse"
    ]


@pytest.mark.parametrize("name", ["max_draft_len", "num_nextn_predict_layers"])
@pytest.mark.filterwarnings("ignore:.*num_nextn_predict_layers")
def test_config_of_the_adapter_is_taken(name: str) -> None:
    theirs = decoding_config_class()(**{name: 3}, mtp={"verification": "block"})
    ours = MTPDecodingConfig(max_draft_len=3, mtp={"verification": "block"})
    assert parse_config({"model": "m", "speculative_config": theirs}).speculative_config == ours
    assert LLMConfig(model="m", speculative_config=theirs).speculative_config == ours


def test_schema_has_the_keys_and_their_values() -> None:
    schema = json_schema()
    assert schema["properties"]["tensor_parallel_size"]["enum"] == [1]
    assert "enum" not in schema["properties"]["print_iter_log"]
    backends = schema["properties"]["attn_backend"]
    assert [each["enum"] for each in backends["anyOf"]] == [["auto", "sdpa", "triton"], ["TRTLLM"]]
    assert backends["default"] == "auto"
    cache = schema["$defs"]["KVCacheConfig"]["properties"]
    assert cache["dtype"]["enum"] == ["auto"]
    assert "sa_config" in schema["$defs"]["MTPDecodingConfig"]["properties"]


class TestFilesNextToIt:
    """A model and the plugin's options that come from elsewhere."""

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "host.yaml"
        path.write_text("speculative_config: {decoding_type: MTP, max_draft_len: 3}\n")
        return path

    @pytest.fixture
    def options(self, tmp_path: Path) -> Path:
        folder = tmp_path / "elsewhere"
        folder.mkdir()
        path = folder / "options.yaml"
        path.write_text("draft_vocab: ids.json\nverification: block\n")
        return path

    def test_model(self, file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert load_config(file, model="m").model == str(tmp_path / "elsewhere" / "m")
        with pytest.raises(ConfigError, match=r"host\.yaml: model: required key is missing"):
            load_config(file)

    def test_model_of_the_call_is_before_the_files(self, file: Path, tmp_path: Path) -> None:
        file.write_text("model: theirs\n")
        assert load_config(file, model=tmp_path / "ours").model == str(tmp_path / "ours")

    def test_options(self, file: Path, options: Path) -> None:
        spec = load_config(file, model="m", plugin_options=options).speculative_config
        assert isinstance(spec, MTPDecodingConfig)
        assert spec.max_draft_len == 3
        assert spec.mtp.verification == "block"
        assert spec.mtp.draft_vocab == str(options.parent / "ids.json")
