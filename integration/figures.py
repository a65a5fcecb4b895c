"""Every figure of the README files, made from ``integration/results/*.json``.

``python -m integration.figures`` writes the blocks between ``<!-- figures: NAME -->`` and
``<!-- end -->`` anew, and the README's plot. A test compares them.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from integration.bench.files import written_whole

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "integration" / "results"
PAGES = (ROOT / "README.md", RESULTS / "README.md")
PLOT = RESULTS / "speed.svg"
OPS_BATCHES, E2E_BATCHES, LONG_BATCHES = (1, 8, 64, 256), (1, 8, 64), (1, 8, 32)
_BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Json = dict[str, Any]


# --- what the files say ---


def result(name: str) -> Json:
    """A result file."""
    document: Json = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return document


def case(name: str, label: str) -> Json:
    """A case of a result file."""
    found: Json = next(each for each in result(name)["cases"] if each["case"] == label)
    return found


def asked(name: str, label: str, ask: str) -> Json:
    """What one kind of requests got in a case."""
    found: Json = next(each for each in case(name, label)["asks"] if each["ask"] == ask)
    return found


def mean_ms(name: str, label: str) -> float:
    """Of a step: the time that its tokens per second stand for."""
    told = case(name, label)
    tokens = told["batch"] * told["acceptance_length"]
    return float(tokens / told["steady_tokens_per_second"] * 1000)


def step_ratio(name: str, label: str, batch: int) -> float:
    """Of a step, as a multiple of one without MTP in the same file."""
    return mean_ms(name, f"{label}/b{batch}") / mean_ms(name, f"off/b{batch}")


def tokens_per_step(name: str, label: str) -> float:
    """As asked for."""
    return 1 + sum(case(name, label)["synthetic_acceptance"]["expected_per_position"])


def speed_up(name: str, label: str, batch: int) -> float:
    """Tokens per second of generating steps over those without MTP, at the asked-for acceptance."""
    return tokens_per_step(name, f"{label}/b{batch}") / step_ratio(name, label, batch)


# --- how they are told ---


def _each(values: Sequence[float], digits: int) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in values)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([_row(*head), "|" + "---|" * len(head), *(_row(*row) for row in rows)])


def _text(*sentences: str) -> str:
    lines = textwrap.wrap(" ".join(sentences), 100, break_long_words=False, break_on_hyphens=False)
    return "\n".join([*lines, ""])


def _milliseconds(name: str, label: str, batches: Sequence[int] = E2E_BATCHES) -> str:
    return _each([mean_ms(name, f"{label}/b{batch}") for batch in batches], 2)


def _over_off(name: str, label: str, batches: Sequence[int] = E2E_BATCHES) -> list[str]:
    ratios = [step_ratio(name, label, batch) for batch in batches]
    gains = [speed_up(name, label, batch) for batch in batches]
    return [_milliseconds(name, label, batches), _each(ratios, 2), _each(gains, 2)]


def _microseconds(name: str, label: str) -> str:
    """Of every batch size; "-" of one that the run did not come to."""
    measured = {each["case"]: each for each in result(name)["cases"]}
    found = [measured.get(f"{label}/b{batch}") for batch in OPS_BATCHES]
    return " / ".join(
        "-" if each is None else f"{each['graph_us']['median']:.1f}" for each in found
    )


STEPS = {
    "K = 1": ("e2e-8gb", "eagle-k1"),
    "K = 3": ("e2e-8gb", "eagle-k3"),
    "K = 3, drafts among 32768 ids": ("e2e-8gb-draft-vocab", "eagle-k3"),
}


def speed() -> str:
    """Whole steps, without MTP and with it."""
    rows = [["MTP off", _milliseconds("e2e-8gb", "off"), "", ""]]
    rows += [[row, *_over_off(*where)] for row, where in STEPS.items()]
    tokens = tokens_per_step("e2e-8gb", "eagle-k3/b1")
    head = [
        f"batch {' / '.join(map(str, E2E_BATCHES))}",
        "milliseconds of a step",
        "over MTP off",
        "tokens per second over MTP off",
    ]
    told = result("e2e-8gb")
    machine, model = told["machine"], told["model"]
    about = _text(
        f"One {machine['gpu']}, torch {machine['torch']}, Triton {machine['triton']};",
        f"{model['family']} of {model['parameters'] / 1e9:.1f} billion {model['weights']} weights",
        f"in {model['dtype']}, hidden size {model['hidden_size']}, {model['vocab_size']} words,",
        f"one MTP layer; {told['input_tokens']} tokens in, {told['output_tokens']} out. Random",
        f"weights draft nothing useful, so acceptance is synthetic: {tokens:.3f} tokens per step",
        "with K = 3, whatever a run drew.",
    )
    return f"{about}\n{_table(head, rows)}\n"


def long_prompts() -> str:
    """Whole steps behind long prompts."""
    name = "e2e-8gb-long"
    head = [
        f"behind prompts of {result(name)['input_tokens']} tokens, batch "
        f"{' / '.join(map(str, LONG_BATCHES))}",
        "milliseconds of a step",
        "over MTP off",
        "tokens per second over MTP off",
    ]
    rows = [
        ["MTP off", _milliseconds(name, "off", LONG_BATCHES), "", ""],
        [
            f"K = 3, drafts among {result(name)['draft_vocab']} ids",
            *_over_off(name, "eagle-k3", LONG_BATCHES),
        ],
    ]
    return f"{_table(head, rows)}\n"


def beside_vllm() -> str:
    """Whole steps beside vLLM's."""
    told = result("vllm-0.24")
    head = [
        f"milliseconds to the next step, batch {' / '.join(map(str, told['batches']))}",
        "vLLM 0.24",
        "mtp_plugin",
        "vLLM over mtp_plugin",
    ]
    rows = []
    for row, way in (("MTP off", "off"), ("K = 1", "k1"), ("K = 3", "k3")):
        theirs, ours = (told["step_ms"][way][who] for who in ("vllm", "mtp_plugin"))
        ratios = [slow / fast for slow, fast in zip(theirs, ours, strict=True)]
        rows.append([row, *(_each(each, 2) for each in (theirs, ours, ratios))])
    return f"Of {told['source']}:\n\n{_table(head, rows)}\n"


ASKED = {
    "`temperature` 0.6, `top_p` 0.95, `top_k` 20": "sampled",
    "and the log-probability of the token": "sampled-logprob",
    "and the top 5": "sampled-top5",
    "and a repetition penalty": "sampled-penalty",
    "one such request without them among greedy ones": "one-sampled",
}


def asks() -> str:
    """What requests cost that ask for more than first choices."""

    def over_greedy(ask: str, batch: int) -> str:
        if ask == "one-sampled" and batch == 1:
            return "-"
        name, label = "e2e-8gb-asked", f"eagle-k3/b{batch}"
        greedy = case(name, label)["step_ms"]["median"]
        return f"{asked(name, label, ask)['step_ms']['median'] / greedy:.3f}"

    head = ["every request asks for", "milliseconds of a step over greedy, batch 1 / 8 / 64"]
    rows = [
        [row, " / ".join(over_greedy(ask, batch) for batch in E2E_BATCHES)]
        for row, ask in ASKED.items()
    ]
    return _table(head, rows) + "\n"


def parts() -> str:
    """Where the time of a step goes."""
    spent = case("e2e-8gb", "eagle-k3/b1")["phases_ms"]
    gaps = [each["phases_ms"]["host_gap"] * 1000 for each in result("e2e-8gb")["cases"]]
    return _text(
        f"With K = 3 at batch 1 a step is {spent['target']:.2f} ms of target,",
        f"{spent['draft_layers']:.2f} ms of draft layers, {spent['draft_head']:.2f} ms of draft",
        f"heads and {spent['acceptance']:.2f} ms of everything else that MTP adds. Between two",
        f"steps the device waits {min(gaps):.0f} to {max(gaps):.0f} microseconds, copies and the",
        "sampler's kernel included.",
    )


def tiny_model() -> str:
    """Ratios of one run: the host sets the figures themselves."""
    name = "e2e-tiny_model"

    def rate(label: str) -> float:
        return float(case(name, label)["steady_tokens_per_second"])

    ours, off = rate("eagle-k3/b1"), rate("off/b1")
    theirs = result(name)["transformers"]["generate_use_mtp"]["decode_tokens_per_second"]
    told = result(name)
    return _text(
        f"The tiny model ({told['model']['dtype']}, greedy, {told['input_tokens']} tokens in and",
        f"{told['output_tokens']} out, real acceptance) decodes {ours / off:.1f} times as many",
        f"tokens per second with K = 3 as without MTP at batch 1, and {ours / theirs:.0f} times as",
        "many as transformers' `generate(use_mtp=True)` in the same run.",
    )


WAYS = {
    "`coupled`": "coupled",
    "`rejection`": "rejection",
    "`block`": "block",
    "greedy drafts": "greedy-drafts",
}
WAYS_FILE, WAYS_BATCH = "e2e-tiny_model-sampled", 16


def of_ways(temperature: str, ways: Sequence[str] = tuple(WAYS.values())) -> list[Json]:
    """What the ways to judge drafts gave at a temperature, of both workers."""
    return [
        asked(WAYS_FILE, f"{worker}-k3/b{WAYS_BATCH}", f"{way}-t{temperature}")
        for worker in ("eagle", "vanilla")
        for way in ways
    ]


def _lengths_and_rate(told: Json) -> str:
    return f"{told['acceptance_length']:.2f} / {told['steady_tokens_per_second']:.0f}"


def ways() -> str:
    """Which way to judge drafts gives how many tokens per step and per second."""
    told = result(WAYS_FILE)
    temperatures = ("0.6", "1.0")
    head = [
        "tokens per step / per second",
        *(f"{w}, {t}" for w in ("eagle", "vanilla") for t in temperatures),
    ]
    rows = []
    for row, way in WAYS.items():
        by_temperature = [of_ways(temperature, [way]) for temperature in temperatures]
        cells = [each for worker in zip(*by_temperature, strict=True) for each in worker]
        rows.append([row, *map(_lengths_and_rate, cells)])
    every = {t: of_ways(t) for t in temperatures}
    steps = [WAYS_BATCH * each["step_ms"]["samples"] for t in temperatures for each in every[t]]
    repeated = {
        t: [each["share_of_repeated_8_grams"] for each in found] for t, found in every.items()
    }
    low, high = (f"{min(repeated[t]):.0%} to {max(repeated[t]):.0%}" for t in temperatures)
    where = _text(
        f"Batch {WAYS_BATCH}, {told['input_tokens']} tokens in and {told['output_tokens']} out,",
        f"{told['model']['dtype']} on a {told['model']['device'].split(':')[0].upper()};",
        "worker and temperature:",
    )
    behind = _text(
        f"A figure has {round(min(steps), -1)} to {round(max(steps), -1)} steps of one request",
        f"behind it. At temperature 0.6 {low} of the 8-grams repeat, which flatters every way; at",
        f"1.0 {high}.",
    )
    return f"{where}\n{_table(head, rows)}\n\n{behind}"


def soak() -> str:
    """What random traffic came to."""
    told, shorter = result("soak-tiny_model"), result("soak-tiny_model-15min")
    counts = told["counts"]
    thirds = next(each for each in told["checks"] if each["name"] == "acceptance length by third")
    return _text(
        f"{told['options']['seconds'] / 60:.0f} minutes of random traffic on the GPU in",
        f"{told['model']['dtype']}: {counts['requests']} requests, {counts['aborted']} of them",
        f"aborted, {counts['preemptions']} preemptions. All {counts['tokens']} tokens are",
        "target-only decoding's, nothing leaked, no growth. Acceptance in thirds of the run is",
        f"{thirds['found']}. So it is for {shorter['options']['seconds'] / 60:.0f} minutes of",
        f"later files (`soak-tiny_model-15min.json`, {shorter['counts']['tokens']} tokens).",
    )


KERNELS = {
    "whole step, vanilla (`chain: output`, exact window)": ("step", "step/vanilla"),
    "whole step, eagle": ("step", "step/eagle"),
    "whole step, vanilla, `target_shift`": ("step", "step/vanilla-target-shift"),
    "acceptance, strict": ("ops", "accept/strict"),
    "acceptance, relaxed, all requests thinking": ("ops", "accept/relaxed"),
    "history and draft inputs of generations": ("ops", "first-pass/vanilla"),
}


def kernels() -> str:
    """Parts of a step beside TensorRT-LLM's torch path."""
    theirs = result("torch-path")["microseconds"]
    rows = [
        [
            row,
            _microseconds(name, label),
            f"{case(name, f'{label}/b8')['launches']['kernels']:.0f}",
            _each(theirs[label], 0) if label in theirs else "",
        ]
        for row, (name, label) in KERNELS.items()
    ]
    head = [
        "one step's part, microseconds in a CUDA graph",
        "batch 1 / 8 / 64 / 256",
        "launches",
        "TensorRT-LLM's torch path",
    ]
    mixed = case("ops", "first-pass/mixed/b64")["graph_us"]["median"]
    fused = case("ops", "bookkeeping/fused/b256")["graph_us"]["median"]
    copied = case("ops", "state-copy/b64")["gb_per_s"]
    others = _text(
        "History and draft inputs of a mixed batch (4 prompts of 2048 tokens, 60 generations)",
        f"take {mixed:.0f} us; the fused bookkeeping of 256 decode requests {fused:.1f} us; the",
        f"recurrent-state copy moves {copied:.0f} GB/s.",
    )
    return f"{_table(head, rows)}\n\n{others}"


DRAWS = {
    "first choices": "greedy",
    "temperature": "temperature",
    "with the sum that log-probabilities need": "temperature-logprobs",
    "top-k 50, top-p 0.9": "top-k-top-p",
    "with that sum": "top-k-top-p-logprobs",
    "top-k 20, top-p 0.95, temperature 0.6, peaked rows": "top-k-top-p-peaked",
    "top-p 0.95, peaked rows": "top-p-peaked",
    "top-p 0.95, flat rows": "top-p",
    "top-k 1000, top-p 0.95, flat rows": "many-top-k",
    "top-k 50, top-p 0.9 in a step that edits logits": "top-k-top-p-beside-edits",
    "the same with a bias": "top-k-bias",
    "with allowed ids": "top-k-allowed",
    "with penalties": "top-k-penalties",
}


def draws() -> str:
    """What drawing tokens takes."""
    head = [
        "draws, microseconds in a CUDA graph, acceptance among them",
        "batch 1 / 8 / 64 / 256",
    ]
    rows = [[row, _microseconds("ops-draws", f"draw/{label}")] for row, label in DRAWS.items()]
    return f"{_table(head, rows)}\n\n{_beside_flashinfer()}"


def _beside_flashinfer() -> str:
    """The same draws by FlashInfer, in a run of both."""
    told = result("flashinfer-0.7")
    head = ["flat rows but for the last", "FlashInfer 0.7.2 calls", "its microseconds", "ours"]
    rows = [
        [
            each["row"],
            f"`{each['call']}`",
            *(_each(each[whose], 1) for whose in ("flashinfer", "mtp_plugin")),
        ]
        for each in told["draws"]
    ]
    beside = _text(
        f"Of {told['source']}. Theirs",
        "gets rows that are divided by the temperature, ours divides them and judges drafts. On",
        "flat rows with top-p alone both try ids until one is inside the cut: theirs random ones,",
        "ours by their noise from the highest score on, so that a seed gives the same token",
        "wherever it is drawn.",
    )
    return f"{_table(head, rows)}\n\n{beside}"


def relaxed() -> str:
    """What relaxed acceptance buys and costs."""
    told = result("relaxed-tiny_model")
    head = [
        "`relaxed_topk`, `relaxed_delta`",
        "acceptance length",
        "tokens that are the target's first choice",
        "tokens before the text is another",
    ]
    rows = [
        [
            f"{each['topk']}, {each['delta']:g}",
            f"{each['acceptance_length']:.2f}",
            f"{each['first_choice_share']:.1%}",
            f"{each['tokens_before_another']:.0f} of {told['tokens']}",
        ]
        for each in told["settings"]
    ]
    return f"{_table(head, rows)}\n"


BLOCKS: dict[str, Callable[[], str]] = {
    "speed": speed,
    "long-prompts": long_prompts,
    "vllm": beside_vllm,
    "asked": asks,
    "parts": parts,
    "tiny-model": tiny_model,
    "ways": ways,
    "soak": soak,
    "kernels": kernels,
    "draws": draws,
    "relaxed": relaxed,
}


def rendered(text: str) -> str:
    """A page with its blocks as the result files have them."""
    return _BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}{found[3]}", text)


def named_blocks(text: str) -> list[str]:
    """Of a page."""
    return [found[2] for found in _BLOCK.finditer(text)]


# --- the plot of `speed` ---


def plotted() -> dict[str, list[float]]:
    """Speed-ups by batch size, of each way to draft."""
    return {
        row: [round(speed_up(*where, batch), 2) for batch in E2E_BATCHES]
        for row, where in STEPS.items()
    }


COLOURS = ("#7fb2d9", "#2f79b5", "#e08a2c")
BAR, GAP, HEIGHT, UNIT = 46, 50, 250, 80  # pixels; of a bar, between batches, in all, of 1.0


def plot() -> str:
    """Bars of `plotted`, as SVG."""
    told, base = plotted(), HEIGHT - 30
    group = len(told) * BAR + GAP
    width = 40 + group * len(E2E_BATCHES)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12" text-anchor="middle">',
        "<title>Tokens per second over MTP off</title>",
        f'<rect width="{width}" height="{HEIGHT}" fill="white"/>',
    ]
    for number, (row, values) in enumerate(told.items()):
        colour = COLOURS[number]
        left = 40 + number * 120
        drawn.append(f'<rect x="{left}" y="10" width="12" height="12" fill="{colour}"/>')
        drawn.append(f'<text x="{left + 18}" y="20" text-anchor="start">{row}</text>')
        for place, value in enumerate(values):
            x, high = 40 + place * group + number * BAR, round(value * UNIT, 1)
            drawn.append(
                f'<rect x="{x}" y="{base - high:.1f}" width="{BAR - 4}" height="{high}" '
                f'fill="{colour}"/>'
            )
            middle = x + BAR / 2 - 2
            drawn.append(f'<text x="{middle}" y="{base - high - 4:.1f}">{value:.2f}</text>')
    for place, batch in enumerate(E2E_BATCHES):
        middle = 40 + place * group + (len(told) * BAR - 4) / 2
        drawn.append(f'<text x="{middle}" y="{base + 18}">batch {batch}</text>')
    drawn.append(
        f'<path d="M30 {base}H{width}M30 {base - UNIT}H{width}" stroke="black" '
        'stroke-width="0.7" fill="none"/>'
    )
    drawn.append(f'<text x="16" y="{base - UNIT + 4}">1.0</text>')
    return "\n".join([*drawn, "</svg>", ""])


def main() -> None:
    """Write every page anew, and the plot."""
    for page in PAGES:
        _write(page, rendered(page.read_text(encoding="utf-8")))
    _write(PLOT, plot())


def _write(page: Path, text: str) -> None:
    with written_whole(page) as beside:
        beside.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
