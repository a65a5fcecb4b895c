"""Figures in the README are those of the result files, which compared what they measured."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "integration" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROSE = " ".join(README.split())
OPS_BATCHES, E2E_BATCHES, LONG_BATCHES = (1, 8, 64, 256), (1, 8, 64), (1, 8, 32)


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def case(name: str, label: str) -> dict[str, Any]:
    return next(each for each in result(name)["cases"] if each["case"] == label)


def over_batches(batches: tuple[int, ...], value: Callable[[int], float], digits: int) -> str:
    return " / ".join(f"{value(batch):.{digits}f}" for batch in batches)


def microseconds(name: str, label: str) -> str:
    """In a CUDA graph, by batch size."""
    return over_batches(
        OPS_BATCHES, lambda batch: case(name, f"{label}/b{batch}")["graph_us"]["median"], 1
    )


def launches(name: str, label: str) -> str:
    return f"{case(name, f'{label}/b8')['launches']['kernels']:.0f}"


def mean_ms(name: str, label: str) -> float:
    """Of a step: the time that its tokens per second stand for."""
    told = case(name, label)
    tokens = told["batch"] * told["acceptance_length"]
    return float(tokens / told["steady_tokens_per_second"] * 1000)


def milliseconds(name: str, label: str, batches: tuple[int, ...] = E2E_BATCHES) -> str:
    """Of a step, by batch size."""
    return over_batches(batches, lambda batch: mean_ms(name, f"{label}/b{batch}"), 2)


def step_ratio(name: str, label: str, batch: int) -> float:
    """Of a step, as a multiple of one without MTP in the same file."""
    return mean_ms(name, f"{label}/b{batch}") / mean_ms(name, f"off/b{batch}")


def over_off(name: str, label: str, batches: tuple[int, ...] = E2E_BATCHES) -> str:
    return over_batches(batches, lambda batch: step_ratio(name, label, batch), 2)


def tokens_per_step(name: str, label: str) -> float:
    """As asked for."""
    return 1 + sum(case(name, label)["synthetic_acceptance"]["expected_per_position"])


def speed_ups(name: str, label: str, batches: tuple[int, ...] = E2E_BATCHES) -> str:
    """Tokens per second of generating steps over those without MTP, at the asked-for acceptance."""

    def ratio(batch: int) -> float:
        tokens = tokens_per_step(name, f"{label}/b{batch}")
        return tokens / step_ratio(name, label, batch)

    return over_batches(batches, ratio, 2)


KERNELS = {
    "whole step, vanilla (`chain: output`, exact window)": ("step", "step/vanilla"),
    "whole step, eagle": ("step", "step/eagle"),
    "whole step, vanilla, `target_shift`": ("step", "step/vanilla-target-shift"),
    "acceptance, strict": ("ops", "accept/strict"),
    "acceptance, relaxed, all requests thinking": ("ops", "accept/relaxed"),
    "history and draft inputs of generations": ("ops", "first-pass/vanilla"),
}
STEPS = {
    "K = 1": ("e2e-8gb", "eagle-k1"),
    "K = 3": ("e2e-8gb", "eagle-k3"),
    "K = 3, drafts among 32768 ids": ("e2e-8gb-draft-vocab", "eagle-k3"),
}


@pytest.mark.parametrize("row", KERNELS)
def test_kernels(row: str) -> None:
    name, label = KERNELS[row]
    assert f"| {row} | {microseconds(name, label)} | {launches(name, label)} |" in README


def test_steps_without_mtp() -> None:
    assert f"| MTP off | {milliseconds('e2e-8gb', 'off')} |" in README


@pytest.mark.parametrize("row", STEPS)
def test_steps(row: str) -> None:
    name, label = STEPS[row]
    cells = milliseconds(name, label), over_off(name, label), speed_ups(name, label)
    assert f"| {row} | {' | '.join(cells)} |" in README


def test_speed_ups_are_at_the_asked_for_acceptance() -> None:
    tokens = tokens_per_step("e2e-8gb", "eagle-k3/b1")
    assert f"whatever a run drew: {tokens:.3f} tokens per step with K = 3." in PROSE


def test_steps_of_long_contexts() -> None:
    name, label = "e2e-8gb-long", "eagle-k3"
    assert f"behind prompts of {result(name)['input_tokens']} tokens" in README
    assert f"| MTP off | {milliseconds(name, 'off', LONG_BATCHES)} |" in README
    cells = [of(name, label, LONG_BATCHES) for of in (milliseconds, over_off, speed_ups)]
    assert f"| K = 3, drafts among 32768 ids | {' | '.join(cells)} |" in README
    assert result(name)["draft_vocab"] == 32768


@pytest.mark.parametrize(
    ("row", "way"), [("MTP off", "off"), ("K = 1", "k1"), ("K = 3", "k3")], ids=lambda each: each
)
def test_steps_beside_vllm(row: str, way: str) -> None:
    told = result("vllm-0.24")
    assert told["source"] == "one run on one H200, torch 2.11"
    batches = " / ".join(map(str, told["batches"]))
    assert f"| mean milliseconds to the next step, batch {batches} | vLLM 0.24 |" in README
    theirs, ours = (told["step_ms"][way][who] for who in ("vllm", "mtp_plugin"))
    ratios = [slow / fast for slow, fast in zip(theirs, ours, strict=True)]
    cells = [" / ".join(f"{value:.2f}" for value in each) for each in (theirs, ours, ratios)]
    assert f"| {row} | {' | '.join(cells)} |" in README


def test_the_shape_beside_vllm_is_that_of_the_steps() -> None:
    shape, model = result("vllm-0.24")["shape"], result("e2e-8gb")["model"]
    assert {name: model[name] for name in shape if name in model} == {
        name: value for name, value in shape.items() if name != "intermediate_size"
    }


def test_other_kernels() -> None:
    mixed = case("ops", "first-pass/mixed/b64")["graph_us"]["median"]
    fused = case("ops", "bookkeeping/fused/b256")
    copied = case("ops", "state-copy/b64")["gb_per_s"]
    assert f"(4 prompts of 2048 tokens, 60 generations) take {mixed:.0f} us;" in PROSE
    assert f"256 decode requests {fused['graph_us']['median']:.1f} us;" in PROSE
    assert f"recurrent-state copy moves {copied:.0f} GB/s" in PROSE


def test_the_parts_of_a_step() -> None:
    spent = case("e2e-8gb", "eagle-k3/b1")["phases_ms"]
    assert (
        f"a step is {spent['target']:.2f} ms of target, {spent['draft_layers']:.2f} ms of draft "
        f"layers, {spent['draft_head']:.2f} ms of draft heads and {spent['acceptance']:.2f} ms of "
        "everything else"
    ) in PROSE
    gaps = [each["phases_ms"]["host_gap"] * 1000 for each in result("e2e-8gb")["cases"]]
    assert f"the device waits {min(gaps):.0f} to {max(gaps):.0f} microseconds" in PROSE


def test_the_tiny_model() -> None:
    """Ratios of one run: the host sets the figures themselves."""
    name = "e2e-tiny_model"

    def rate(label: str) -> float:
        return float(case(name, label)["steady_tokens_per_second"])

    gain = rate("eagle-k3/b1") / rate("off/b1")
    told = (
        f"decodes {gain:.1f} times as many tokens per second with K = 3 as without MTP at batch 1"
    )
    assert told in PROSE
    theirs = result(name)["transformers"]["generate_use_mtp"]["decode_tokens_per_second"]
    ratio = rate("eagle-k3/b1") / theirs
    assert f"and {ratio:.0f} times as many as transformers' `generate(use_mtp" in PROSE


def relaxed_row(told: dict[str, Any]) -> str:
    extras = [
        "" if told[key] is None else f"{told[key]:g}" for key in ("run_limit", "entropy_scale")
    ]
    cells = [
        f"{told['topk']}, {told['delta']:g}",
        *extras,
        f"{told['acceptance_length']:.2f}",
        f"{told['first_choice_share']:.1%}",
        f"{told['tokens_before_another']:.0f} of {result('relaxed-tiny_model')['tokens']}",
    ]
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def test_relaxed_acceptance() -> None:
    """Every setting that was measured, and nothing else, stands in the table."""
    rows = [relaxed_row(each) for each in result("relaxed-tiny_model")["settings"]]
    head = "| `relaxed_topk`, `relaxed_delta` | run limit |"
    table = README[README.index(head) :].split("\n\n")[0].split("\n")
    assert table[2:] == rows


WAYS = {
    "`coupled`": "coupled",
    "`rejection`": "rejection",
    "`block`": "block",
    "greedy drafts": "greedy-drafts",
}


def asked(name: str, label: str, ask: str) -> dict[str, Any]:
    return next(each for each in case(name, label)["asks"] if each["ask"] == ask)


ASKED = {
    "`temperature` 0.6, `top_p` 0.95, `top_k` 20": "sampled",
    "and the log-probability of the token": "sampled-logprob",
    "and the top 5": "sampled-top5",
    "and a repetition penalty": "sampled-penalty",
    "one such request without them among greedy ones": "one-sampled",
}
DRAWS = {
    "first choices": "greedy",
    "temperature": "temperature",
    "top-k 50, top-p 0.9": "top-k-top-p",
    "top-k 20, top-p 0.95, temperature 0.6, peaked rows": "top-k-top-p-peaked",
    "top-p 0.95, peaked rows": "top-p-peaked",
    "top-p 0.95, flat rows": "top-p",
    "top-k 50, top-p 0.9 in a step that edits logits": "top-k-top-p-beside-edits",
    "the same with a bias": "top-k-bias",
    "with allowed ids": "top-k-allowed",
    "with penalties": "top-k-penalties",
}


@pytest.mark.parametrize("row", ASKED)
def test_what_sampling_costs_a_step(row: str) -> None:
    def over_greedy(batch: int) -> str:
        if ASKED[row] == "one-sampled" and batch == 1:
            return "-"
        label = f"eagle-k3/b{batch}"
        told = asked("e2e-8gb-asked", label, ASKED[row])
        assert told["matched"]
        greedy = case("e2e-8gb-asked", label)["step_ms"]["median"]
        return f"{told['step_ms']['median'] / greedy:.3f}"

    assert f"| {row} | {' / '.join(map(over_greedy, E2E_BATCHES))} |" in README


@pytest.mark.parametrize("row", DRAWS)
def test_draws(row: str) -> None:
    assert f"| {row} | {microseconds('ops-draws', f'draw/{DRAWS[row]}')} |" in README


def ways_of(temperature: str) -> list[dict[str, Any]]:
    """Of both workers."""
    return [
        asked("e2e-tiny_model-sampled", f"{worker}-k3/b16", f"{way}-t{temperature}")
        for worker in ("eagle", "vanilla")
        for way in WAYS.values()
    ]


@pytest.mark.parametrize("row", WAYS)
def test_ways_to_judge_drafts(row: str) -> None:
    cells = [
        asked("e2e-tiny_model-sampled", f"{worker}-k3/b16", f"{WAYS[row]}-t{temperature}")
        for worker in ("eagle", "vanilla")
        for temperature in ("0.6", "1.0")
    ]
    assert all(cell["matched"] for cell in cells)
    told = " | ".join(f"{cell['acceptance_length']:.2f}" for cell in cells)
    assert f"| {row} | {told} |" in README


def test_where_and_how_the_ways_were_compared() -> None:
    told = result("e2e-tiny_model-sampled")
    assert (told["input_tokens"], told["output_tokens"]) == (64, 192)
    assert told["model"]["dtype"] == "float32"
    assert told["model"]["device"] == "cpu"
    assert "batch 16, 64 tokens in and 192 out, float32 on a CPU" in PROSE
    assert all(each["acceptance"] in (None, "real") for each in told["cases"])
    for temperature, words in (
        ("0.6", "{} to {} of the 8-grams repeat"),
        ("1.0", "at 1.0 {} to {}"),
    ):
        shares = [each["share_of_repeated_8_grams"] for each in ways_of(temperature)]
        assert words.format(f"{min(shares):.0%}", f"{max(shares):.0%}") in PROSE
    every = [*ways_of("0.6"), *ways_of("1.0")]
    steps = [16 * each["step_ms"]["samples"] for each in every]
    assert f"A figure has {round(min(steps), -1)} to {round(max(steps), -1)} steps of one" in PROSE
    for each in every:
        keeps_text = each["ask"].startswith(("coupled", "greedy"))
        told_of = "the run without MTP of the same seeds" if keeps_text else "the entropy of"
        assert each["match"]["compared_with"].startswith(told_of)
        assert each["match"]["ties"] == 0


def test_the_soak() -> None:
    soak = result("soak-tiny_model")
    counts = soak["counts"]
    assert soak["holds"] is True
    assert soak["ties"] == 0
    assert soak["model"]["dtype"] == "float32"
    assert f"{counts['requests']} requests, {counts['aborted']} of them aborted" in PROSE
    assert f"{counts['preemptions']} preemptions): all {counts['tokens']} tokens" in PROSE
    shorter = result("soak-tiny_model-15min")
    assert shorter["holds"] is True
    assert f"`soak-tiny_model-15min.json`, {shorter['counts']['tokens']} tokens" in PROSE
    thirds = next(each for each in soak["checks"] if each["name"] == "acceptance length by third")
    assert f"in thirds of the run is {thirds['found']}" in PROSE


def test_what_the_readme_links_to_is_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert any(link.endswith(".png") for link in links)
    assert [link for link in links if not (ROOT / link).exists()] == []


OURS = [path for path in sorted(RESULTS.glob("*.json")) if result(path.stem)["kind"] != "beside"]


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_every_result_was_compared(path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document.get("matched", document.get("holds")) is True
    assert document["machine"]["package_tree"]
