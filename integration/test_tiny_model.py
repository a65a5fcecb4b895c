"""The shipped model end to end: what it is, what the report says, what the executor makes of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from integration.tiny_model.hf_patch import load_with_mtp
from mtp_plugin.config import load_config
from mtp_plugin.hosts.embedded import LLM, SamplingParams
from mtp_plugin.hosts.embedded.models import LoadedModel, load_model, preflight
from tests.conftest import once_per_run  # noqa: F401
from tests.greedy import greedy_decode

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "integration" / "tiny_model"
CHECKPOINT = FOLDER / "checkpoint"
CONFIGS = sorted((ROOT / "configs").glob("tiny_*.yaml"))
HOST_CONFIGS = [  # other lines say the same
    ROOT / "configs" / "trtllm" / f"1.3b_{kind}.yaml" for kind in ("eagle", "vanilla", "schedule")
]
SYNTHETIC = ROOT / "configs" / "tiny_synthetic.yaml"  # draws accept: not the model's text
NUM_TOKENS = 48

torch.set_num_threads(1)  # thin layers: a second thread costs more than it gives


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [item["prompt"] for item in json.loads((FOLDER / "prompts.json").read_text())]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(CHECKPOINT, num_mtp_layers=3)


@pytest.fixture(scope="module")
def plain_texts(prompts, once_per_run) -> list[list[int]]:  # noqa: F811
    """The target alone, by the no_overlap decoder over transformers' own attention."""

    def decode(_: Path) -> str:
        target = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
        end = (target.generation_config.eos_token_id,)
        texts = (greedy_decode(target, tokenizer.encode(p), NUM_TOKENS, end) for p in prompts)
        return json.dumps(list(texts))

    return json.loads(once_per_run("tiny_model_texts", decode))


def test_the_checkpoint_is_small_and_whole():
    files = list(CHECKPOINT.iterdir())
    assert sum(f.stat().st_size for f in files) <= 16 * 2**20
    checked = preflight(CHECKPOINT, 3)
    assert checked.facts.model_type == "glm4_moe"
    assert checked.facts.num_mtp_layers == 3
    assert 8 <= checked.facts.num_hidden_layers <= 16
    assert checked.facts.dtype is torch.bfloat16


def test_the_report_reaches_the_figures():
    evaluation = json.loads((FOLDER / "report.json").read_text())["evaluation"]
    forced = evaluation["teacher_forced"]
    for name in ("vanilla (chain: output)", "eagle (layer 1 reused)"):
        assert forced[name]["top1_agreement"][0] >= 0.60
        assert all(0.5 < overlap < 1.0 for overlap in forced[name]["overlap_at_temperature_1"])
    drafting = evaluation["free_running"]["drafting"]
    for name in ("eagle", "vanilla, chain: output, draft_window: exact"):
        assert drafting[name]["acceptance_length"] >= 2.3
    # the variants are listed too, and repetition is counted
    assert len(drafting) == 5
    assert 0.0 <= evaluation["free_running"]["share_of_repeated_8_grams"] <= 1.0


def test_the_manifest_splits_by_hash_and_the_prompts_are_held_out():
    manifest = json.loads((FOLDER / "manifest.json").read_text())
    split = {row[0]: row[3] for row in manifest["files"]}
    for path, side in split.items():
        held_out = int(hashlib.sha256(path.encode()).hexdigest(), 16) % 20 == 0
        assert (side == "held_out") == held_out
    for item in json.loads((FOLDER / "prompts.json").read_text()):
        assert split[item["path"]] == "held_out"


def test_forced_acceptance_is_marked(model, prompts):
    with LLM(load_config(SYNTHETIC), model=model) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=NUM_TOKENS))
    assert all(output.label.name == "synthetic" for output in outputs)
    assert llm.executor.acceptance.label.is_drawn
    assert 1.5 <= llm.executor.acceptance.acceptance_length <= 4.0


@pytest.mark.parametrize("path", [p for p in CONFIGS if p != SYNTHETIC], ids=lambda p: p.stem)
def test_every_config_runs_losslessly(path, model, prompts, plain_texts):
    config = load_config(path)
    with LLM(config, model=model) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=NUM_TOKENS))
    assert [o.token_ids for o in outputs] == plain_texts
    length = llm.executor.acceptance.acceptance_length
    if config.speculative_config is None:
        assert length == 1.0
    else:
        assert length >= 2.3  # a broken draft shows here and nowhere else


@pytest.mark.parametrize("path", HOST_CONFIGS, ids=lambda p: p.stem)
def test_files_of_tensorrt_llm_run_losslessly(path, model, prompts, plain_texts):
    options = path.with_name("mtp_plugin.yaml")
    config = load_config(path, model=CHECKPOINT, plugin_options=options)
    with LLM(config, model=model) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=NUM_TOKENS))
    assert [o.token_ids for o in outputs] == plain_texts
    assert llm.executor.acceptance.acceptance_length >= 1.5


@pytest.mark.parametrize(
    ("name", "no_overlap"),
    [("tiny_eagle", False), ("tiny_vanilla", True)],
    ids=["eagle-overlap", "vanilla-no_overlap"],
)
def test_chunks_and_preemption_leave_text_and_acceptance_alone(
    name, no_overlap, model, prompts, plain_texts
):
    config = load_config(ROOT / "configs" / f"{name}.yaml").model_dump()
    config.update(
        disable_overlap_scheduler=no_overlap,
        max_num_tokens=48,
        kv_cache_config={"tokens_per_block": 8, "max_tokens": 360},
    )
    with LLM(config, model=model) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=NUM_TOKENS))
    assert [o.token_ids for o in outputs] == plain_texts
    assert llm.executor.num_preemptions > 0
    assert llm.executor.acceptance.acceptance_length >= 2.3


def test_relaxed_acceptance_accepts_more_while_thinking(model, prompts):
    config = load_config(ROOT / "configs" / "tiny_relaxed.yaml")
    strict = load_config(ROOT / "configs" / "tiny_eagle.yaml")
    lengths = []
    for each in (strict, config):
        with LLM(each, model=model) as llm:
            llm.generate(
                [f"<think>{p}" for p in prompts], SamplingParams(max_new_tokens=NUM_TOKENS)
            )
        lengths.append(llm.executor.acceptance.acceptance_length)
    assert lengths[1] > lengths[0]


def test_transformers_runs_the_same_files(prompts, plain_texts):
    """Its own ``use_mtp`` gives the same text, with the patch that names the layer numbers."""
    target = load_with_mtp(CHECKPOINT)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    for prompt, want in list(zip(prompts, plain_texts, strict=True))[:3]:
        ids = tokenizer(prompt, return_tensors="pt")
        output = target.generate(**ids, max_new_tokens=NUM_TOKENS, do_sample=False, use_mtp=True)
        assert output[0, ids["input_ids"].shape[1] :].tolist() == want
