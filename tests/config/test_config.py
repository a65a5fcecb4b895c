"""What a config means once it is read: names of K, resolution, modes, freezing, round trips."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import warnings
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from mtp_plugin.config import (
    MAX_DRAFT_LEN,
    CudaGraphConfig,
    KVCacheConfig,
    LLMConfig,
    MTPDecodingConfig,
    MTPPluginOptions,
    OtherDecodingConfig,
    SpeculativeDecodingMode,
    json_schema,
    load_config,
    parse_config,
    speculative,
)
from mtp_plugin.errors import ConfigError
from mtp_plugin.speculative.drafting import MTPEagleWorker, MTPWorker

calm = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])


def mtp(**options: Any) -> MTPDecodingConfig:
    """The speculative_config of a mapping with these options."""
    config = parse_config({"model": "m", "speculative_config": {"decoding_type": "MTP", **options}})
    assert isinstance(config.speculative_config, MTPDecodingConfig)
    return config.speculative_config


class TestNamesOfK:
    def test_older_name_alone_is_a_valid_config(self) -> None:
        with pytest.warns(DeprecationWarning, match=r"^num_nextn_predict_layers is the older name"):
            config = MTPDecodingConfig(num_nextn_predict_layers=3)
        assert config.max_draft_len == config.num_nextn_predict_layers == config.draft_len == 3

    def test_warning_points_at_the_caller(self) -> None:
        with pytest.warns(DeprecationWarning, match="older name") as caught:
            MTPDecodingConfig(num_nextn_predict_layers=3)
        assert [Path(warning.filename) for warning in caught] == [Path(__file__)]

    def test_in_a_file_the_warning_names_the_file_and_is_shown_by_default(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "older.yaml"
        path.write_text(
            "model: m\nspeculative_config: {decoding_type: MTP, num_nextn_predict_layers: 3}\n"
        )
        with pytest.warns(FutureWarning) as caught:
            load_config(path)
        assert [str(warning.message) for warning in caught] == [
            f"{path}: speculative_config.num_nextn_predict_layers is the older name of "
            "max_draft_len; write max_draft_len"
        ]

    @pytest.mark.filterwarnings("ignore:num_nextn_predict_layers")
    def test_both_names_with_one_value_agree(self) -> None:
        config = MTPDecodingConfig(num_nextn_predict_layers=3, max_draft_len=3)
        assert config == MTPDecodingConfig(max_draft_len=3)

    def test_older_name_without_a_value_says_nothing(self) -> None:
        assert MTPDecodingConfig(num_nextn_predict_layers=None, max_draft_len=2).draft_len == 2

    def test_both_names_read_none_before_resolution(self) -> None:
        config = MTPDecodingConfig()
        assert config.max_draft_len is None
        assert config.num_nextn_predict_layers is None

    def test_the_callers_mapping_is_left_alone(self) -> None:
        spec = {"decoding_type": "MTP", "num_nextn_predict_layers": 3}
        with pytest.warns(FutureWarning):
            parse_config({"model": "m", "speculative_config": spec})
        assert spec == {"decoding_type": "MTP", "num_nextn_predict_layers": 3}


class TestResolve:
    @pytest.mark.parametrize(
        ("options", "num_mtp_layers", "draft_len"),
        [
            ({}, 3, 1),
            ({"use_mtp_vanilla": True}, 3, 3),
            ({"use_mtp_vanilla": True}, 1, 1),
            ({"max_draft_len": 2, "use_mtp_vanilla": True}, 3, 2),
            # R44: a checkpoint of one layer serves any K with eagle
            ({"max_draft_len": 3}, 1, 3),
        ],
    )
    def test_fills_k_in(self, options: dict[str, Any], num_mtp_layers: int, draft_len: int) -> None:
        config = MTPDecodingConfig(**options)
        resolved = config.resolve(num_mtp_layers)
        assert resolved.draft_len == resolved.num_nextn_predict_layers == draft_len
        assert config.max_draft_len == options.get("max_draft_len")

    def test_keeps_everything_else(self) -> None:
        config = MTPDecodingConfig(
            use_relaxed_acceptance_for_thinking=True,
            relaxed_topk=10,
            relaxed_delta=0.6,
            begin_thinking_phase_token=7,
            max_concurrency=4,
            mtp={"keep_warm": False, "end_thinking_phase": "</think>"},
        )
        resolved = config.resolve(1)
        assert resolved == config.model_copy(update={"max_draft_len": 1})
        assert resolved.resolve(1) == resolved

    def test_keeps_the_schedule_frozen(self) -> None:
        schedule = {4: 3, 16: 1}
        config = MTPDecodingConfig(max_draft_len=3, draft_len_schedule=schedule).resolve(3)
        assert config.draft_len_schedule == schedule
        assert hash(config) == hash(MTPDecodingConfig(max_draft_len=3, draft_len_schedule=schedule))

    def test_keeps_a_hosts_subclass(self) -> None:
        class HostConfig(MTPDecodingConfig):
            pass

        assert type(HostConfig().resolve(1)) is HostConfig

    def test_of_the_whole_file(self) -> None:
        config = LLMConfig(model="m", speculative_config=MTPDecodingConfig(use_mtp_vanilla=True))
        spec = config.resolve(3).speculative_config
        assert isinstance(spec, MTPDecodingConfig)
        assert spec.draft_len == 3

    @pytest.mark.parametrize("spec", [None, OtherDecodingConfig("Toy", {"k": 2})])
    def test_of_a_file_without_mtp_changes_nothing(self, spec: OtherDecodingConfig | None) -> None:
        config = LLMConfig(model="m", speculative_config=spec)
        assert config.resolve(3) is config


class TestStrictRelaxation:
    """Relaxed acceptance that relaxes nothing: TensorRT-LLM's defaults, and taken as there."""

    @pytest.fixture(autouse=True)
    def nothing_reported(self, caplog: pytest.LogCaptureFixture) -> None:
        speculative._warn_if_nothing_is_relaxed.cache_clear()
        caplog.set_level("INFO", logger="mtp_plugin")

    @pytest.mark.parametrize(
        ("relaxes", "topk", "delta"),
        [(True, 1, 0.0), (True, 1, 0.6), (True, 10, 0.0), (False, 10, 0.6), (False, 1, 0.6)],
    )
    def test_is_reported_once(
        self, caplog: pytest.LogCaptureFixture, relaxes: bool, topk: int, delta: float
    ) -> None:
        config = MTPDecodingConfig(
            use_relaxed_acceptance_for_thinking=relaxes, relaxed_topk=topk, relaxed_delta=delta
        )
        assert not caplog.records
        LLMConfig(model="m", speculative_config=config).resolve(3)
        config.resolve(1).resolve(1)
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert "relaxes nothing unless it is true, relaxed_topk is above 1" in record.getMessage()

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {
                "use_relaxed_acceptance_for_thinking": True,
                "relaxed_topk": 2,
                "relaxed_delta": 0.1,
            },
        ],
    )
    def test_is_reported_of_nothing_else(
        self, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
    ) -> None:
        MTPDecodingConfig(**options).resolve(1)
        assert not caplog.records


class TestDraftLenFor:
    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({}, {1: 3, 8: 3, 1000: 3}),
            ({"draft_len_schedule": {4: 3, 16: 1}}, {1: 3, 4: 3, 5: 1, 16: 1, 17: 0}),
            ({"draft_len_schedule": {32: 0, 4: 3, 16: 1}}, {4: 3, 16: 1, 17: 0, 32: 0, 33: 0}),
            ({"max_concurrency": 4}, {1: 3, 4: 3, 5: 0}),
        ],
    )
    def test_by_batch_size(self, options: dict[str, Any], expected: dict[int, int]) -> None:
        config = MTPDecodingConfig(max_draft_len=3, **options)
        assert {size: config.draft_len_for(size) for size in expected} == expected

    def test_schedule_is_kept_ascending_and_takes_the_text_keys_of_json(self) -> None:
        config = mtp(max_draft_len=3, draft_len_schedule={"16": 1, "4": 3})
        assert list((config.draft_len_schedule or {}).items()) == [(4, 3), (16, 1)]

    @pytest.mark.parametrize(
        ("schedule", "differs"),
        [
            ({1: 3, 4: 2, 8: 0}, "3 requests draft 2 tokens each; * they draft 3; * {3: 3, 7: 2}"),
            ({1: 3, 4: 3, 8: 0}, "7 requests draft 0 tokens each; * they draft 3; * {3: 3, 7: 3}"),
            ({1: 3, 2: 0}, None),  # both readings are equal
            ({1: 3, 4: 1}, None),
            ({2: 3, 8: 0}, None),
        ],
    )
    def test_schedule_in_the_form_of_trtllm_1_2_is_a_warning(
        self, caplog: pytest.LogCaptureFixture, schedule: dict[int, int], differs: str | None
    ) -> None:
        speculative._warn_of_older_schedule.cache_clear()
        config = MTPDecodingConfig(max_draft_len=3, draft_len_schedule=schedule)
        config.resolve(1).resolve(1)
        assert len(caplog.messages) == (differs is not None)
        if differs is not None:
            assert fnmatchcase(caplog.messages[0], f"draft_len_schedule: *{differs}")


class TestMode:
    def test_eagle_unless_vanilla(self) -> None:
        assert mtp(max_draft_len=3).spec_dec_mode is SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL
        assert mtp(use_mtp_vanilla=True).spec_dec_mode is SpeculativeDecodingMode.MTP

    @pytest.mark.parametrize(
        ("mode", "true"),
        [
            (SpeculativeDecodingMode.MTP, {"is_mtp_vanilla"}),
            (
                SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL,
                {"is_mtp_eagle", "is_mtp_eagle_one_model"},
            ),
        ],
    )
    def test_answers(self, mode: SpeculativeDecodingMode, true: set[str]) -> None:
        questions = ("is_", "use_", "has_", "need", "support", "without")
        requested = [name for name in vars(SpeculativeDecodingMode) if name.startswith(questions)]
        both = {
            "has_spec_decoder",
            "is_mtp",
            "is_mtp_one_model",
            "needs_kv_cache_rewind",
            "support_dynamic_draft_len",
            "support_overlap_scheduler",
            "use_one_engine",
            "without_logits",
        }
        assert {name for name in requested if getattr(mode, name)()} == both | true

    @pytest.mark.parametrize("mode", SpeculativeDecodingMode)
    def test_grammars_are_not_offered(self, mode: SpeculativeDecodingMode) -> None:
        """A host requests before it hands a worker its decoder; none takes one."""
        assert not mode.support_guided_decoder()
        assert not mode.support_capturable_guided_decoder()
        for worker in (MTPWorker, MTPEagleWorker):
            assert worker(MTPDecodingConfig(max_draft_len=1)).set_guided_decoder(object()) is False

    def test_none_drafts_nothing(self) -> None:
        mode = SpeculativeDecodingMode.from_string(None)
        assert mode.is_none()
        assert not mode.is_mtp()
        assert mode.support_overlap_scheduler()

    def test_from_string(self) -> None:
        assert SpeculativeDecodingMode.from_string("mtp") is SpeculativeDecodingMode.MTP


class TestFrozen:
    @pytest.mark.parametrize(
        ("model", "name"),
        [
            (LLMConfig(model="m"), "max_batch_size"),
            (MTPDecodingConfig(), "max_draft_len"),
            (MTPPluginOptions(), "kernels"),
            (KVCacheConfig(), "max_tokens"),
            (CudaGraphConfig(), "batch_sizes"),
            (OtherDecodingConfig("Toy"), "decoding_type"),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_fields(self, model: Any, name: str) -> None:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(model, name, 1)
        with pytest.raises((ValidationError, AttributeError)):
            model.num_nextn_predict_layers = 1

    @pytest.mark.parametrize(
        "change",
        [
            lambda schedule: schedule.__setitem__(8, 1),
            lambda schedule: schedule.__delitem__(4),
            lambda schedule: schedule.update({8: 1}),
            lambda schedule: schedule.pop(4),
            lambda schedule: schedule.popitem(),
            lambda schedule: schedule.setdefault(8, 1),
            lambda schedule: schedule.clear(),
            lambda schedule: schedule.__ior__({8: 1}),
        ],
    )
    def test_schedule(self, change: Any) -> None:
        schedule = MTPDecodingConfig(max_draft_len=3, draft_len_schedule={4: 3}).draft_len_schedule
        with pytest.raises(TypeError, match="a config is frozen"):
            change(schedule)
        assert copy.copy(schedule) == {4: 3}

    def test_options_of_another_plugin_are_a_copy(self) -> None:
        written: dict[str, Any] = {"decoding_type": "Toy", "sizes": [1, 2], "tree": {"width": 2}}
        spec = parse_config({"model": "m", "speculative_config": written}).speculative_config
        written["sizes"].append(3)
        written["tree"]["width"] = 3
        assert isinstance(spec, OtherDecodingConfig)
        assert spec.options == {"sizes": (1, 2), "tree": {"width": 2}}
        with pytest.raises(TypeError, match="a config is frozen"):
            spec.options["tree"]["width"] = 3


class TestOtherPlugins:
    def test_a_mapping_of_another_type_is_kept_for_its_plugin(self) -> None:
        written = {"decoding_type": "Toy", "options": {"a": 1}, "max_draft_len": "any"}
        spec = parse_config({"model": "m", "speculative_config": written}).speculative_config
        assert isinstance(spec, OtherDecodingConfig)
        assert spec.decoding_type == "Toy"
        assert spec.options == {"options": {"a": 1}, "max_draft_len": "any"}
        assert spec.model_dump() == written

    def test_direct_construction(self) -> None:
        spec = OtherDecodingConfig("Toy", {"sizes": [1, 2]})
        assert spec == OtherDecodingConfig.model_validate({"decoding_type": "Toy", "sizes": [1, 2]})
        assert spec.model_dump() == {"decoding_type": "Toy", "sizes": [1, 2]}


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


def test_keys_of_vllm_are_those_here() -> None:
    theirs = {
        "model": "m",
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
        "torch_dtype": "float32",
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "additional_config": {"mtp_plugin": {}},
        "generation_config": "vllm",
        "hf_overrides": {},
        "override_generation_config": {},
        "served_model_name": "name",
        "max_logprobs": 20,
        "compilation_config": {"mode": 3},
        "kv_cache_memory_bytes": None,
        "download_dir": "cache",
        "limit_mm_per_prompt": {"image": 0},
        "model_impl": "auto",
        "quantization": None,
        "tensor_parallel_size": 1,
        "seed": 0,
        "disable_log_stats": True,
        "gpu_memory_utilization": 0.5,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 3},
    }
    ours = {
        "model": "m",
        "seed": 0,
        "max_seq_len": 64,
        "max_batch_size": 4,
        "max_num_tokens": 128,
        "dtype": "float32",
        "gpu_memory_utilization": 0.5,
        "speculative_config": {"decoding_type": "MTP", "max_draft_len": 3},
    }
    assert parse_config(theirs) == parse_config(ours)
    drafting = {
        "model": "m",
        "num_speculative_tokens": 3,
        "enforce_eager": True,
        "draft_tensor_parallel_size": 1,
        "draft_sample_method": "greedy",
        "rejection_sample_method": "standard",
    }
    for form in (drafting, json.dumps(drafting)):
        assert parse_config({**theirs, "speculative_config": form}) == parse_config(ours)


@pytest.mark.parametrize(
    ("verification", "value", "ours"),
    [
        ("rejection", "greedy", "greedy"),
        ("block", "probabilistic", "plain"),
        (["coupled", "rejection"], "probabilistic", "plain"),
    ],
)
def test_draft_sample_method_is_read_where_it_changes_outputs(
    verification: object, value: str, ours: str, caplog: pytest.LogCaptureFixture
) -> None:
    for options in ({"verification": verification}, MTPPluginOptions(verification=verification)):
        spec = MTPDecodingConfig(mtp=options, draft_sample_method=value)
        assert spec.mtp.draft_sampling == ours
    assert not caplog.messages
    with pytest.raises(ConfigError, match=rf"is mtp: {{draft_sampling: {ours}}}, but"):
        MTPDecodingConfig(
            mtp={"verification": verification, "draft_sampling": "coupled"},
            draft_sample_method=value,
        )


def test_draft_sample_method_is_set_aside_where_it_changes_no_output(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert MTPDecodingConfig(draft_sample_method="greedy") == MTPDecodingConfig()
    assert caplog.messages[0].endswith("as they change no output: draft_sample_method")


def test_keys_of_sglang_are_those_here() -> None:
    theirs = {
        "context_length": 64,
        "max_running_requests": 4,
        "disable_overlap_schedule": True,
        "random_seed": 3,
        "tp_size": 1,
        "speculative_eagle_topk": 1,
        "disable_radix_cache": True,
    }
    ours = {"max_seq_len": 64, "max_batch_size": 4, "disable_overlap_scheduler": True, "seed": 3}
    assert parse_config({"model": "m", **theirs}) == parse_config({"model": "m", **ours})


class TestFile:
    def test_defaults(self) -> None:
        config = parse_config({"model": "m"})
        assert config.model_dump() == {
            "model": "m",
            "dtype": "auto",
            "device": "auto",
            "max_batch_size": 8,
            "max_num_tokens": 2048,
            "max_seq_len": None,
            "kv_cache_config": {
                "tokens_per_block": 32,
                "max_tokens": None,
                "free_gpu_memory_fraction": 0.9,
            },
            "gpu_memory_utilization": None,
            "attn_backend": "auto",
            "fused_layers": "auto",
            "cuda_graph_config": None,
            "disable_overlap_scheduler": False,
            "enable_chunked_prefill": True,
            "seed": None,
            "speculative_config": None,
        }

    def test_relative_model_is_taken_from_the_files_folder(self, tmp_path: Path) -> None:
        (tmp_path / "configs").mkdir()
        path = tmp_path / "configs" / "one.yaml"
        path.write_text("model: ../checkpoint\n")
        assert load_config(path).model == str(tmp_path.resolve() / "checkpoint")
        assert parse_config({"model": "../checkpoint"}).model == "../checkpoint"

    def test_absolute_and_home_models_stay(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        path = tmp_path / "one.yaml"
        path.write_text(f"model: {tmp_path / 'a'}\n")
        assert load_config(path).model == str(tmp_path / "a")
        path.write_text("model: ~/a\n")
        assert load_config(path).model == str(tmp_path / "a")

    def test_a_draft_vocabulary_lies_with_the_file(self, tmp_path: Path) -> None:
        """A relative path is taken from the file's folder; a count is no path."""
        path = tmp_path / "one.yaml"
        lines = "model: m\nspeculative_config:\n  decoding_type: MTP\n  mtp: {draft_vocab: %s}\n"
        for written, found in (
            ("lists/ids.json", str(tmp_path.resolve() / "lists" / "ids.json")),
            (str(tmp_path / "a.json"), str(tmp_path / "a.json")),
            ("32", 32),
            ("null", None),
        ):
            path.write_text(lines % written)
            spec = load_config(path).speculative_config
            assert isinstance(spec, MTPDecodingConfig)
            assert spec.mtp.draft_vocab == found
            assert spec.resolve(2).mtp.draft_vocab == found
        assert mtp(mtp={"draft_vocab": "ids.json"}).mtp.draft_vocab == "ids.json"

    def test_a_byte_order_mark_is_no_part_of_the_first_key(self, tmp_path: Path) -> None:
        path = tmp_path / "one.yaml"
        path.write_text("model: /m\nmax_batch_size: 4\n", encoding="utf-8-sig")
        assert load_config(path) == LLMConfig(model="/m", max_batch_size=4)

    def test_numbers_are_read_as_people_write_them(self, tmp_path: Path) -> None:
        path = tmp_path / "one.yaml"
        path.write_text(
            "model: m\nspeculative_config:\n  decoding_type: MTP\n"
            "  use_relaxed_acceptance_for_thinking: true\n  relaxed_delta: 1e-3\n"
        )
        spec = load_config(path).speculative_config
        assert isinstance(spec, MTPDecodingConfig)
        assert spec.relaxed_delta == 0.001

    def test_merge_keys_may_be_overridden(self, tmp_path: Path) -> None:
        path = tmp_path / "one.yaml"
        path.write_text(
            "model: m\n"
            "kv_cache_config: {<<: {tokens_per_block: 8, max_tokens: 64}, max_tokens: 32}\n"
        )
        assert load_config(path).kv_cache_config == KVCacheConfig(tokens_per_block=8, max_tokens=32)

    def test_graph_sizes_are_kept_ascending(self) -> None:
        assert CudaGraphConfig(batch_sizes=[8, 1, 4]).batch_sizes == (1, 4, 8)

    def test_largest_graph(self) -> None:
        assert CudaGraphConfig(batch_sizes=[8, 1]).largest == 8
        assert CudaGraphConfig(max_batch_size=4).largest == 4
        assert CudaGraphConfig().largest is None

    def test_one_rate_holds_for_every_draft(self) -> None:
        one = MTPPluginOptions(verification="synthetic", synthetic_acceptance=0.5)
        assert one.acceptance_shares(3) == (0.5, 0.25, 0.125)
        each = MTPPluginOptions(verification="synthetic", synthetic_acceptance=[0.9, 0.5, 0.5])
        assert each.acceptance_shares(3) == (0.9, 0.5, 0.5)

    def test_portable_example(self) -> None:
        """TensorRT-LLM's own example, older and newer spelling."""
        relaxed = {
            "decoding_type": "MTP",
            "use_relaxed_acceptance_for_thinking": True,
            "relaxed_topk": 10,
            "relaxed_delta": 0.6,
        }
        with pytest.warns(FutureWarning):
            older = mtp(**relaxed, num_nextn_predict_layers=3)
        assert older == mtp(**relaxed, max_draft_len=3)


class TestSchema:
    def test_names_every_key_with_a_description(self) -> None:
        schema = json_schema()
        assert schema["additionalProperties"] is False
        for definition in (schema, *schema["$defs"].values()):
            assert definition["type"] == "object"
            for name, key in definition["properties"].items():
                assert key.get("description"), name

    def test_reports_the_drafters_apart(self) -> None:
        definitions = json_schema()["$defs"]
        ours, other = definitions["MTPDecodingConfig"], definitions["OtherDecodingConfig"]
        assert ours["required"] == other["required"] == ["decoding_type"]
        assert ours["additionalProperties"] is False
        assert other["additionalProperties"] is True
        assert list(other["properties"]) == ["decoding_type"]

    def test_marks_the_older_name(self) -> None:
        key = json_schema()["$defs"]["MTPDecodingConfig"]["properties"]["num_nextn_predict_layers"]
        assert key["deprecated"] is True


positive = st.integers(1, 64)
verifications = st.sampled_from(
    [("coupled", "coupled"), ("coupled", "greedy")]
    + [(mode, drafts) for mode in ("rejection", "block") for drafts in ("plain", "greedy")]
    + [("synthetic", "coupled"), ("synthetic", "greedy"), ("rejection", None)]
    + [(("coupled", "block"), drafts) for drafts in ("coupled", "plain", "greedy", None)]
)


@st.composite
def mtp_configs(draw: st.DrawFn) -> MTPDecodingConfig:
    draft_len = draw(st.integers(1, MAX_DRAFT_LEN))
    verification, draft_sampling = draw(verifications)
    vanilla = draw(st.booleans())
    options: dict[str, Any] = {"max_draft_len": draft_len, "use_mtp_vanilla": vanilla}
    if draw(st.booleans()):
        sizes = draw(st.lists(positive, min_size=1, max_size=4, unique=True).map(sorted))
        rest = draw(st.lists(st.integers(0, draft_len), min_size=3, max_size=3))
        options["draft_len_schedule"] = dict(zip(sizes, [draft_len, *rest], strict=False))
    else:
        options["max_concurrency"] = draw(st.none() | positive)
    if verification != "synthetic" and draw(st.booleans()):
        options["use_relaxed_acceptance_for_thinking"] = True
        options["relaxed_topk"] = draw(positive)
        options["relaxed_delta"] = draw(st.floats(0, 1))
    gate = {}
    if draw(st.booleans()):
        options["acceptance_window"] = draw(positive)
        options["acceptance_length_threshold"] = draw(st.floats(1.01, 1 + draft_len / 2))
        gate["gate_margin"] = draw(st.floats(0, draft_len / 2))
        gate["gate_probe_interval"] = draw(positive)
        gate["gate_max_probe_interval"] = draw(st.integers(64, 1000))
    plugin = {
        **gate,
        "verification": verification,
        "draft_sampling": draft_sampling,
        "draft_window": draw(st.sampled_from(["exact", "trtllm"])) if vanilla else "exact",
        "draft_vocab": draw(st.none() | positive | st.text(min_size=1)),
        "keep_warm": draw(st.booleans()),
        "kernels": draw(st.sampled_from(["auto", "triton", "reference"])),
    }
    if verification == "synthetic":
        rates = st.lists(st.floats(0, 1), min_size=draft_len, max_size=draft_len)
        falling = rates.map(lambda each: sorted(each, reverse=True))
        plugin["synthetic_acceptance"] = draw(st.floats(0, 1) | falling)
        plugin["synthetic_seed"] = draw(st.integers(0, 2**32 - 1))
    return MTPDecodingConfig(**options, mtp=plugin)


@st.composite
def llm_configs(draw: st.DrawFn) -> LLMConfig:
    batch_size = draw(st.integers(1, 64))
    sizes = st.lists(st.integers(1, batch_size), min_size=1, max_size=4, unique=True)
    other = st.dictionaries(
        st.text("abc", min_size=1), st.lists(st.integers()) | st.text(), max_size=3
    ).map(lambda options: OtherDecodingConfig("Toy", options))
    return LLMConfig(
        model=draw(st.text(st.characters(codec="ascii"), min_size=1)),
        max_batch_size=batch_size,
        kv_cache_config=KVCacheConfig(tokens_per_block=draw(positive)),
        cuda_graph_config=draw(
            st.none() | st.builds(CudaGraphConfig, batch_sizes=sizes, enable_padding=st.booleans())
        ),
        speculative_config=draw(st.none() | mtp_configs() | other),
    )


@calm
@given(llm_configs())
def test_round_trips(config: LLMConfig) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse_config(config.model_dump()) == config
        as_yaml = yaml.safe_dump(config.model_dump(mode="json"))
        assert parse_config(yaml.safe_load(as_yaml)) == config
        assert LLMConfig.model_validate_json(config.model_dump_json()) == config
        assert pickle.loads(pickle.dumps(config)) == config
        assert copy.copy(config) == copy.deepcopy(config) == config
        assert hash(copy.deepcopy(config)) == hash(config)


@calm
@given(mtp_configs(), st.integers(1, 100))
def test_drafts_stay_within_k_and_fall_to_zero(config: MTPDecodingConfig, size: int) -> None:
    assert 0 <= config.draft_len_for(size) <= config.draft_len
    assert config.draft_len_for(1) == config.draft_len
    limited = config.max_concurrency or config.draft_len_schedule
    assert (config.draft_len_for(1000) == 0) == bool(limited)


def test_config_does_not_import_torch() -> None:
    code = (
        "import sys, types, pathlib\n"
        "package = types.ModuleType('mtp_plugin')\n"
        f"package.__path__ = [{str(Path(__file__).parents[2] / 'mtp_plugin')!r}]\n"
        "sys.modules['mtp_plugin'] = package\n"
        "import mtp_plugin.config\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
