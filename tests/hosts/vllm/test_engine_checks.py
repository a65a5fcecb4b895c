"""Options of an engine, and configurations that the plugin refuses."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtp_plugin import verifications
from mtp_plugin.config.draft_vocab import WANTED
from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts import vllm as vllm_host
from mtp_plugin.hosts.vllm.engine_checks import checked_settings, start_warnings
from mtp_plugin.hosts.vllm.options import VllmOptions, read_options
from mtp_plugin.speculative.rows.options import EngineSettings
from mtp_plugin.speculative.rows.request_options import RequestOptions
from mtp_plugin.speculative.verification import custom
from tests.hosts.vllm import fake_vllm
from tests.hosts.vllm.fake_vllm import make_config

OPTION = "additional_config.mtp_plugin"
KNOWN = (
    "known ones are verification, thinking_begin_token, thinking_end_token, relaxed_topk, "
    "relaxed_delta, kernels, draft_vocab, draft_len, tail"
)
WRONG_OPTIONS: list[tuple[Any, str]] = [
    (True, f"{OPTION}: expected a mapping of options ({{}} for the defaults) or false, got true"),
    ("on", f"{OPTION}: expected a mapping of options ({{}} for the defaults) or false, got 'on'"),
    (1, f"{OPTION}: expected a mapping of options ({{}} for the defaults) or false, got 1"),
    ([], f"{OPTION}: expected a mapping of options ({{}} for the defaults) or false, got []"),
    (
        {"verify": "coupled"},
        f"{OPTION}.verify: unknown option; {KNOWN}",
    ),
    (
        {"drafter": "lookup"},
        f"{OPTION}.drafter: registered drafters run in the embedded executor alone: leave it out, "
        "and choose one of mtp, draft_model, eagle, eagle3, dspark, dflash, ngram, ngram_gpu with "
        "speculative_config.method",
    ),
    ({"verification": 1}, f"{OPTION}.verification: should be a valid string, got 1"),
    ({"relaxed_topk": 0}, f"{OPTION}.relaxed_topk: should be greater than or equal to 1, got 0"),
    (
        {"relaxed_topk": 2**31},
        f"{OPTION}.relaxed_topk: should be less than or equal to 2147483647, got 2147483648",
    ),
    ({"relaxed_topk": 2.0}, f"{OPTION}.relaxed_topk: should be a valid integer, got 2.0"),
    (
        {"relaxed_delta": -0.5},
        f"{OPTION}.relaxed_delta: should be greater than or equal to 0, got -0.5",
    ),
    (
        {"thinking_begin_token": -1},
        f"{OPTION}.thinking_begin_token: should be greater than or equal to 0, got -1",
    ),
    (
        {"thinking_end_token": "</think>"},
        f"{OPTION}.thinking_end_token: should be a valid integer, got '</think>'",
    ),
    (
        {"kernels": "cuda"},
        f"{OPTION}.kernels: should be 'auto', 'triton' or 'reference', got 'cuda'",
    ),
    (
        {"kernels": None},
        f"{OPTION}.kernels: should be 'auto', 'triton' or 'reference', got null",
    ),
    (
        {"draft_vocab": 0},
        f"{OPTION}.draft_vocab: should be greater than or equal to 1, got 0",
    ),
    (
        {"draft_vocab": [1]},
        f"{OPTION}.draft_vocab: should be a number of token ids or the path of a list, got a list",
    ),
    ({"draft_len": 2}, f"{OPTION}.draft_len: should be 'auto', got 2"),
    ({"draft_len": "AUTO"}, f"{OPTION}.draft_len: should be 'auto', got 'AUTO'"),
    ({"tail": 4}, f"{OPTION}.tail: should be a mapping, got 4"),
    ({"tail": {}}, f"{OPTION}.tail.ngram: required key is missing"),
    (
        {"tail": {"ngram": 0}},
        f"{OPTION}.tail.ngram: should be greater than or equal to 1, got 0",
    ),
    (
        {"tail": {"ngram": 4, "n": 2}},
        f"{OPTION}.tail.n: unknown option; known ones are ngram",
    ),
    (
        {"kernels": 3, "x": 1},
        f"{OPTION}.kernels: should be 'auto', 'triton' or 'reference', got 3; "
        f"{OPTION}.x: unknown option; {KNOWN}",
    ),
]

V1 = (
    "the engine uses the V1 model runner: unset the environment variable VLLM_USE_V2_MODEL_RUNNER "
    "if it is 0; else vLLM's log says what the V2 runner lacks"
)
SERVED = (
    "set speculative_config.method to 'draft_model', 'eagle', 'eagle3', 'dspark', 'dflash', "
    "'ngram', 'ngram_gpu', or leave out speculative_config"
)


def draft_model(vocab: int = 900, **changes: Any) -> SimpleNamespace:
    """The draft model of a ``speculative_config``."""
    given = {"architectures": ["LlamaForCausalLM"], "hf_config": SimpleNamespace()}
    return SimpleNamespace(get_vocab_size=lambda: vocab, **given | changes)


def drafting(method: str, model: Any = None, **changes: Any) -> dict[str, Any]:
    given = {"method": method, "draft_model_config": model or draft_model(), **changes}
    return {f"speculative_config__{name}": value for name, value in given.items()}


MAPPED = draft_model(hf_config=SimpleNamespace(draft_vocab_size=300))
DFLASH2 = draft_model(architectures=["DFlash2DraftModel"])
MTP_LAYERS = {"num_nextn_predict_layers": 1}
NO_MAP = (
    "the draft model has a vocabulary of {} ids without a map to the model's 900: use a draft "
    "model of the same vocabulary"
)
OWN_DRAFT_IDS = f"is not supported: leave it out; {OPTION}.draft_vocab takes the same ids"
WRONG_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"use_v2_model_runner": False}, V1),
    (drafting("medusa"), f"the speculative method is 'medusa': {SERVED}"),
    (
        drafting("medusa")
        | {"model_config__hf_config": SimpleNamespace(model_type="glm4_moe", **MTP_LAYERS)},
        "the speculative method is 'medusa': " + SERVED.replace("to ", "to 'mtp', ", 1),
    ),
    (drafting("dspark", draft_model(800)), NO_MAP.format(800)),
    (
        drafting("dspark", enable_adaptive_verification=True),
        "speculative_config.enable_adaptive_verification is not supported: set it to false",
    ),
    (
        drafting("dflash", DFLASH2, draft_sample_method="probabilistic"),
        "speculative_config.draft_sample_method 'probabilistic' is not supported with 'dflash', "
        "whose draft probabilities are not kept: leave it out",
    ),
    (
        drafting("dflash", rejection_sample_method="block"),
        "speculative_config.rejection_sample_method is 'block': leave it out, the plugin verifies "
        "drafts itself",
    ),
    (
        drafting("suffix") | {"use_v2_model_runner": False},
        f"{V1}; the speculative method is 'suffix', which vLLM's V2 model runner does not have: "
        + SERVED,
    ),
    (drafting("draft_model", draft_model(800)), NO_MAP.format(800)),
    (drafting("eagle", MAPPED), NO_MAP.format(300)),
    (drafting("eagle3", draft_model(800)), NO_MAP.format(800)),
    (
        drafting("dflash", draft_model(architectures=["LiLiCorrDraftModel"])),
        "the draft model LiLiCorrDraftModel chooses drafts by a head of its own: use another draft "
        "model, or leave out speculative_config",
    ),
    (
        drafting("ngram", draft_sample_method="probabilistic"),
        "speculative_config.draft_sample_method 'probabilistic' is not supported with 'ngram', "
        "whose draft probabilities are not kept: leave it out",
    ),
    (
        drafting("eagle3", parallel_drafting=True),
        "speculative_config.parallel_drafting is not supported: set it to false",
    ),
    (
        {"speculative_config__rejection_sample_method": "block"},
        "speculative_config.rejection_sample_method is 'block': leave it out, and set "
        '"verification": "block" in additional_config.mtp_plugin, which needs '
        '"draft_sample_method": "probabilistic" in speculative_config',
    ),
    (
        {"speculative_config__rejection_sample_method": "fly"},
        "speculative_config.rejection_sample_method is 'fly': leave it out, the plugin verifies "
        "drafts itself",
    ),
    (
        {"speculative_config__draft_token_map": "map.pt"},
        f"speculative_config.draft_token_map {OWN_DRAFT_IDS}",
    ),
    (
        {"speculative_config__use_local_argmax_reduction": True},
        "speculative_config.use_local_argmax_reduction is not supported: set it to false",
    ),
    (
        {"speculative_config__enable_adaptive_verification": True},
        "speculative_config.enable_adaptive_verification is not supported: set it to false",
    ),
    (
        {"speculative_config__use_heterogeneous_vocab": True},
        "speculative_config.use_heterogeneous_vocab is not supported: set it to false",
    ),
    (
        {"speculative_config__parallel_drafting": True},
        "speculative_config.parallel_drafting is not supported: set it to false",
    ),
    (
        {"model_config__runner_type": "pooling"},
        "the model does not generate text (its runner is 'pooling')",
    ),
    (
        {"model_config__is_diffusion": True},
        "the model is a diffusion model, which does not sample token by token",
    ),
    (
        {"model_config__return_sampling_mask": True},
        "return_sampling_mask is not supported: set it to false",
    ),
    (
        {"model_config__enable_trace_replay": True},
        "enable_trace_replay is not supported: set it to false",
    ),
    (
        {"watermark_config": object()},
        "watermarking is not supported: leave out watermark_config",
    ),
    (
        {"parallel_config__enable_batch_sharded_sampling": True},
        "enable_batch_sharded_sampling is not supported: set it to false",
    ),
]

PROBABILISTIC = {"speculative_config__draft_sample_method": "probabilistic"}
SYNTHETIC = {
    "speculative_config__rejection_sample_method": "synthetic",
    "speculative_config__synthetic_acceptance_rates": [0.5, 0.5, 0.5],
}
NEEDS_PROBS = (
    "needs speculative_config.draft_sample_method 'probabilistic', with which the engine keeps the "
    "probabilities of drafts"
)
NEEDS_TOKENS = "relaxed acceptance needs thinking_begin_token and thinking_end_token: set both"
WRONG_VERIFICATION: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"verification": "typical"},
        {},
        "verification: expected one of coupled, rejection, block, got 'typical'",
    ),
    ({"verification": "rejection"}, {}, f"verification: rejection {NEEDS_PROBS}"),
    ({"verification": "block"}, {}, f"verification: block {NEEDS_PROBS}"),
    (
        {"verification": "block"},
        drafting("dflash", parallel_drafting=True),
        "verification: block needs the probabilities of drafts, which are not kept with "
        "speculative_config.method 'dflash': use coupled",
    ),
    (
        {"verification": "rejection"},
        PROBABILISTIC | SYNTHETIC,
        "verification: rejection cannot be combined with rejection_sample_method 'synthetic'",
    ),
    ({"thinking_begin_token": 5}, {}, NEEDS_TOKENS),
    ({"thinking_end_token": 5}, {}, NEEDS_TOKENS),
    ({"relaxed_topk": 3}, {}, NEEDS_TOKENS),
    ({"relaxed_delta": 0.5}, {}, NEEDS_TOKENS),
    (
        {"thinking_begin_token": 5, "thinking_end_token": 5},
        {},
        "thinking_begin_token and thinking_end_token must differ, both are 5",
    ),
    (
        {"thinking_begin_token": 5, "thinking_end_token": 900},
        {},
        "thinking_end_token: expected a token id of the model, at most 899, got 900",
    ),
]


@pytest.fixture
def vllm_32(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)


def message_of(config: Any) -> str:
    with pytest.raises(ConfigError) as error:
        checked_settings(config)
    return str(error.value)


def refusal(problem: str) -> str:
    return (
        f"additional_config.mtp_plugin is on, but {problem}. Change this, or turn the plugin off "
        "by leaving out additional_config.mtp_plugin."
    )


@pytest.mark.parametrize(("given", "message"), WRONG_OPTIONS)
def test_wrong_options_are_refused(given: object, message: str) -> None:
    assert message_of(make_config(given)) == message


@pytest.mark.usefixtures("vllm_32")
@pytest.mark.parametrize(("changes", "problem"), WRONG_CONFIGS)
def test_configurations_that_cannot_be_served_are_refused(
    changes: dict[str, Any], problem: str
) -> None:
    assert message_of(make_config(**changes)) == refusal(problem)


@pytest.mark.usefixtures("vllm_32")
def test_a_draft_vocabulary_of_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "VLLM_MTP_DRAFT_VOCAB"
    monkeypatch.setenv(name, "ids.npy")
    assert message_of(make_config()) == refusal(f"the environment variable {name} {OWN_DRAFT_IDS}")
    assert checked_settings(make_config(speculative_config=None)) is not None
    monkeypatch.setenv(name, "")
    assert checked_settings(make_config()) is not None


def test_a_platform_other_than_cuda_and_cpu_starts_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    platforms = fake_vllm.install(monkeypatch)["vllm.platforms"]
    platforms.current_platform.is_cpu = lambda: False
    platforms.current_platform.device_name = "rocm"
    assert start_warnings() == ["the platform 'rocm' was not tested (tested: cuda, cpu)"]


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "0.34.0rc1.dev3+gabc", "1.0"])
def test_untested_versions_start_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    fake_vllm.install(monkeypatch, version)
    shown = ".".join(version.split(".")[:2])
    (warning,) = start_warnings()
    assert warning.startswith(f"vLLM {shown} was not tested (tested: ")


@pytest.mark.usefixtures("vllm_32")
def test_an_entry_point_that_cannot_be_loaded_gives_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = EntryPoint("broken", "no.such.module:thing", verifications.ENTRY_POINT_GROUP)
    monkeypatch.setattr(verifications, "offered_methods", lambda: {"broken": [point]})
    monkeypatch.setattr(custom, "offered_methods", verifications.offered_methods)
    monkeypatch.setattr(verifications, "_custom_codes", {})
    assert start_warnings() == [
        "verification method 'broken' is left out: entry point 'broken' of "
        "mtp_plugin.verifications (no.such.module:thing) cannot be loaded: ModuleNotFoundError: "
        "No module named 'no'"
    ]


@pytest.mark.parametrize(
    "changes",
    [
        drafting("draft_model"),
        drafting("eagle"),
        drafting("eagle3", MAPPED),
        drafting("dflash", MAPPED, parallel_drafting=True),
        drafting("dflash", DFLASH2, parallel_drafting=True),
        drafting("dspark", MAPPED, parallel_drafting=True),
        drafting("dspark", draft_sample_method="probabilistic"),
        drafting("ngram"),
    ],
)
def test_drafters_that_are_served(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    fake_vllm.install(monkeypatch)
    method = changes.get("speculative_config__method", "mtp")
    config = make_config(**changes)
    keeps = config.speculative_config.draft_sample_method == "probabilistic"
    assert checked_settings(config) == EngineSettings(VllmOptions(), 3, keeps, drafter=method)


@pytest.mark.usefixtures("vllm_32")
def test_configurations_that_are_served() -> None:
    assert checked_settings(make_config()) == EngineSettings(VllmOptions(), 3)
    assert checked_settings(make_config(speculative_config=None)) == EngineSettings(
        VllmOptions(), 0
    )
    assert checked_settings(make_config(parallel_config__pipeline_parallel_size=2)) is not None
    settings = checked_settings(make_config({"kernels": "reference", "verification": "coupled"}))
    assert settings == EngineSettings(VllmOptions(kernels="reference"), 3)
    synthetic = make_config(**SYNTHETIC)
    assert checked_settings(synthetic) == EngineSettings(
        VllmOptions(), 3, synthetic_rates=(0.5, 0.5, 0.5)
    )
    given = {"verification": "block", "thinking_begin_token": 5, "thinking_end_token": 7}
    settings = checked_settings(make_config(given, **PROBABILISTIC))
    assert settings == EngineSettings(VllmOptions(**given), 3, keeps_draft_probs=True)
    assert settings.options.is_relaxed
    relaxed = {"thinking_begin_token": 5, "thinking_end_token": 7, "relaxed_delta": 1.5}
    assert checked_settings(make_config(relaxed)) is not None  # may exceed 1, as a request's
    # without drafts, nothing is verified
    assert checked_settings(make_config({"verification": "rejection"}, speculative_config=None))
    assert message_of(make_config({"draft_len": "auto"}, speculative_config=None)) == refusal(
        "draft_len chooses the number of drafts, and there is no speculative_config: leave it out"
    )


@pytest.mark.usefixtures("vllm_32")
def test_a_draft_vocabulary_has_stop_ids_and_thinking_tags(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text("[7, 3, 880]")
    tags = {"thinking_begin_token": 5, "thinking_end_token": 700}
    for option, given, ids, added in (
        (8, {}, [*range(8), 890], 1),
        (891, {}, range(891), 0),
        (8, tags, [*range(8), 700, 890], 2),
        (str(tmp_path / "ids.json"), tags, [2, 3, 5, 7, 700, 880, 890], 4),
    ):
        config = make_config(
            {"draft_vocab": option, **given},
            model_config__hf_config=SimpleNamespace(eos_token_id=2),
            model_config__try_get_generation_config=lambda: {"eos_token_id": [2, 890, 900]},
            parallel_config__tensor_parallel_size=2,
        )
        settings = checked_settings(config)
        assert settings is not None
        assert settings.draft_ids == ids
        assert (settings.num_added_ids, settings.num_ranks) == (added, 2)


@pytest.mark.usefixtures("vllm_32")
def test_a_draft_vocabulary_that_cannot_be_served_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # relative paths are those of the working directory
    (tmp_path / "ids.json").write_text("[1, 900]")
    for option, changes, problem in (
        (901, {}, f"{OPTION}.draft_vocab: expected at most the vocabulary of 900, got 901"),
        (
            "none.json",
            {},
            f"{OPTION}.draft_vocab: none.json: no such file; expected {WANTED}",
        ),
        (
            "ids.json",
            {},
            f"{OPTION}.draft_vocab: ids.json: expected ids of the vocabulary of 900, got 900",
        ),
        (
            5,
            {"speculative_config__draft_lm_head_quantization": "fp8"},
            "draft_vocab is not supported with speculative_config.draft_lm_head_quantization: "
            "leave out one of them",
        ),
        (
            5,
            drafting("eagle"),
            "draft_vocab is served with MTP layers alone, and method is 'eagle': leave it out",
        ),
        (
            5,
            {"speculative_config": None},
            "draft_vocab is served with MTP layers alone, and there is no speculative_config: "
            "leave it out",
        ),
    ):
        assert message_of(make_config({"draft_vocab": option}, **changes)) == refusal(problem)


@pytest.mark.usefixtures("vllm_32")
@pytest.mark.parametrize(("given", "changes", "problem"), WRONG_VERIFICATION)
def test_verification_that_an_engine_cannot_do_is_refused(
    given: dict[str, Any], changes: dict[str, Any], problem: str
) -> None:
    assert message_of(make_config(given, **changes)) == refusal(problem)


@pytest.mark.parametrize(
    "additional",
    [None, {}, {"mtp_plugin": None}, {"mtp_plugin": False}, {"other": {}}, object(), [], "text"],
)
def test_engines_without_options_are_off_whatever_else_they_have(additional: object) -> None:
    config = make_config(use_v2_model_runner=False, speculative_config__method="ngram")
    config.additional_config = additional
    assert read_options(config) is None
    assert checked_settings(config) is None
    assert checked_settings(object()) is None


def test_readme_lists_every_option() -> None:
    readme = (Path(vllm_host.__file__).parent / "README.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `(\w+)` \| `", readme, re.MULTILINE)
    requests = [f"mtp_{name}" for name in vars(RequestOptions())]
    assert table[: -len(requests)] == list(VllmOptions.model_fields)
    assert sorted(table[-len(requests) :]) == sorted(requests)


def test_readme_names_every_refused_feature() -> None:
    readme = (Path(vllm_host.__file__).parent / "README.md").read_text(encoding="utf-8")
    names = [name.partition("__")[2] for changes, _ in WRONG_CONFIGS for name in changes]
    described = {"", "method", "runner_type", "is_diffusion", "draft_model_config", "hf_config"}
    assert [name for name in names if name not in described and f"`{name}" not in readme] == []
