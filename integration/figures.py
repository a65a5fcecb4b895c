"""Write the tables and charts of the README files from ``integration/results/*.json``.

``python -m integration.figures`` rewrites the blocks between ``<!-- figures: NAME -->`` and
``<!-- end -->``. A test compares the pages with the result files.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from integration.charts import Group, Panel, Point, bar_chart, point_chart, step_diagram

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "integration" / "results"
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "guide.md",
    RESULTS / "README.md",
    ROOT / "integration" / "thinking_model" / "README.md",
    ROOT / "mtp_plugin" / "hosts" / "vllm" / "README.md",
    ROOT / "mtp_plugin" / "hosts" / "vllm" / "DEVELOPERS.md",
    ROOT / "mtp_plugin" / "hosts" / "sglang" / "README.md",
)
OPS_BATCHES, E2E_BATCHES, LONG_BATCHES = (1, 8, 64, 256), (1, 8, 64), (1, 8, 32)
_BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Json = dict[str, Any]


# --- read result files ---


def result(name: str) -> Json:
    document: Json = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return document


def case(name: str, label: str) -> Json:
    """Return a case of a result file."""
    found: Json = next(each for each in result(name)["cases"] if each["case"] == label)
    return found


def of_kind(name: str, label: str, kind: str) -> Json:
    """Return the results of one kind of requests in a case."""
    found: Json = next(each for each in case(name, label)["asks"] if each["ask"] == kind)
    return found


def mean_ms(name: str, label: str) -> float:
    """Mean milliseconds of a decode step, from its tokens per second."""
    found = case(name, label)
    tokens = found["batch"] * found["acceptance_length"]
    return float(tokens / found["steady_tokens_per_second"] * 1000)


def step_ratio(name: str, label: str, batch: int) -> float:
    """Milliseconds of a step over those without MTP in the same file."""
    return mean_ms(name, f"{label}/b{batch}") / mean_ms(name, f"off/b{batch}")


def tokens_per_step(name: str, label: str) -> float:
    """Tokens per step at the configured synthetic acceptance."""
    return 1 + sum(case(name, label)["synthetic_acceptance"]["expected_per_position"])


def speed_up(name: str, label: str, batch: int) -> float:
    """Tokens per second over those without MTP, at the configured synthetic acceptance."""
    return tokens_per_step(name, f"{label}/b{batch}") / step_ratio(name, label, batch)


# --- tables ---


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
    """Medians by batch size; "-" if the run has no such case."""
    measured = {each["case"]: each for each in result(name)["cases"]}
    found = [measured.get(f"{label}/b{batch}") for batch in OPS_BATCHES]
    return " / ".join(
        "-" if each is None else f"{each['graph_us']['median']:.1f}" for each in found
    )


STEPS = {
    "K = 1": ("e2e-8gb", "eagle-k1"),
    "K = 3": ("e2e-8gb", "eagle-k3"),
    "K = 3, draft vocabulary 32768": ("e2e-8gb-draft-vocab", "eagle-k3"),
}


def speed() -> str:
    """Whole steps, with MTP off and on."""
    rows = [["MTP off", _milliseconds("e2e-8gb", "off"), "", ""]]
    rows += [[row, *_over_off(*where)] for row, where in STEPS.items()]
    tokens = tokens_per_step("e2e-8gb", "eagle-k3/b1")
    head = [
        f"batch {' / '.join(map(str, E2E_BATCHES))}",
        "step, ms",
        "step time / MTP off",
        "tokens per second / MTP off",
    ]
    found = result("e2e-8gb")
    machine, model = found["machine"], found["model"]
    about = _text(
        f"One {machine['gpu']}, torch {machine['torch']}, Triton {machine['triton']};",
        f"{model['family']} of {model['parameters'] / 1e9:.1f} billion {model['weights']} weights",
        f"in {model['dtype']}, hidden size {model['hidden_size']}, vocabulary",
        f"{model['vocab_size']}, one MTP layer; {found['input_tokens']} input tokens,",
        f"{found['output_tokens']} output tokens. Random weights draft nothing useful, so",
        f"acceptance is synthetic: {tokens:.3f} tokens per step with K = 3.",
    )
    return f"{about}\n{_table(head, rows)}\n"


def long_prompts() -> str:
    """Whole steps after long prompts."""
    name = "e2e-8gb-long"
    head = [
        f"after prompts of {result(name)['input_tokens']} tokens, batch "
        f"{' / '.join(map(str, LONG_BATCHES))}",
        "step, ms",
        "step time / MTP off",
        "tokens per second / MTP off",
    ]
    rows = [
        ["MTP off", _milliseconds(name, "off", LONG_BATCHES), "", ""],
        [
            f"K = 3, draft vocabulary {result(name)['draft_vocab']}",
            *_over_off(name, "eagle-k3", LONG_BATCHES),
        ],
    ]
    return f"{_table(head, rows)}\n"


VLLM = {
    "MTP off, greedy": "off",
    "K = 3, greedy": "k3",
    "K = 3, T = 0.6, top-p 0.95": "k3-t0.6-p0.95",
    "K = 3, T = 0.6, top-p 0.95, top-k 20": "k3-t0.6-p0.95-k20",
}


def _throughput(rows: Sequence[str]) -> str:
    found = result("vllm-0.24-throughput")
    lines = []
    for row in rows:
        theirs, ours = (
            found["tokens_per_second"][VLLM[row]][engine] for engine in ("vllm", "mtp_plugin")
        )
        lines.append(
            [row, "vLLM 0.24", *("-" if value is None else f"{value:,}" for value in theirs)]
        )
        cells = [
            "-" if value is None else f"**{value:,}** ({value / reference:.2f}x)"
            for value, reference in zip(ours, theirs, strict=True)
        ]
        lines.append(["", "mtp_plugin", *cells])
    batches = [f"batch {batch}" for batch in found["batches"]]
    return _table(["tokens per second", "engine", *batches], lines)


NEWEST = {
    "vLLM without MTP": "off",
    "vLLM with MTP": "vllm",
    "with the plugin": "plugin",
    "with the plugin, 32,768 draft ids": "draft_vocab",
}
"""Engines of the README's chart."""
NEWEST_FILE = "vllm-0.33-steps"


def _gpu(name: str) -> str:
    """Return the GPU of a result file, as "H200"."""
    return str(result(name)["machine"]["gpu"].split()[1])


def groups_of_steps() -> dict[str, Json]:
    """Return the groups of engines of `integration.vllm.steps`, of one file or of several."""
    files = sorted(path.stem for path in RESULTS.glob(f"{NEWEST_FILE}*.json"))
    groups = {name: each for file in files for name, each in result(file)["groups"].items()}
    return {name: group for name, group in groups.items() if "step_ms" in group}


def idle_group(groups: dict[str, Json], *engines: str) -> Json:
    """Return the first group with these engines that makes a headline: its outputs are as
    configured, and other processes left the CPU to it.

    Raises:
        ValueError: there is none.
    """
    for group in groups.values():
        is_sound = group.get("matched", True) and not group.get("busy") and "error" not in group
        if is_sound and set(engines) <= set(group["step_ms"]["greedy"]):
            return group
    raise ValueError(
        f"{NEWEST_FILE}: no group of {', '.join(engines)} is matched and not busy; measure it "
        "again on an idle machine: python -m integration.vllm.steps --group NAME"
    )


def newest_rates(key: str) -> dict[str, list[float]]:
    """Return tokens per second over those of vLLM 0.33 with MTP, by engine and batch."""
    groups = groups_of_steps()
    with_drafts = idle_group(groups, "vllm", "plugin", "draft_vocab")["ratio"][key]
    off = idle_group(groups, "vllm", "off")["ratio"][key]["off"]
    tokens = 1 + sum(result(NEWEST_FILE)["synthetic_acceptance"])
    return {
        "off": [1 / (tokens * each[0]) for each in off],
        "vllm": [1.0] * len(off),
        **{name: [1 / each[0] for each in with_drafts[name]] for name in ("plugin", "draft_vocab")},
    }


def throughput() -> str:
    """What the plugin adds to vLLM, in words."""

    def gains(key: str, engine: str) -> str:
        rates = newest_rates(key)[NEWEST[engine]]
        return f"{min(rates):.2f} to {max(rates):.2f}"

    plugin, listed = list(NEWEST)[2:]
    (default, with_top_p), (other, other_with_top_p) = map(
        coupled_over, ("vllm", "vllm_probabilistic")
    )
    return _text(
        "Over vLLM 0.33's own MTP its shorter steps give",
        f"**{gains('t0.6-p0.95', plugin)} times the tokens per second** at T = 0.6, top-p 0.95,",
        f"and {gains('t0.6-p0.95', listed)} with a draft vocabulary of 32,768 ids; greedy",
        f"{gains('greedy', plugin)}, and {gains('greedy', listed)} (batch 1 to 128). Acceptance",
        f"comes on top: at T = 0.8 (trained tiny model) a step outputs {default:.2f} times the",
        f"tokens of vLLM's default, greedy drafts, and {other:.3g} times those of its",
        f"`probabilistic` drafts; {with_top_p:.2f} and {other_with_top_p:.2f} with top-p 0.95.",
        "What vLLM 0.33 alone does not have: one output per seed for any K, `min_p` and",
        "`logit_bias` with drafts, a draft vocabulary of MTP layers, and a verification",
        "method per request.",
    )


def throughput_setting() -> str:
    """What the chart of the README was measured with."""
    found = result(NEWEST_FILE)
    model = found["model"]
    return _text(
        "K is the number of drafts per step, T the sampling temperature (0: greedy). One",
        f"{_gpu(NEWEST_FILE)};",
        f"{model['family']} with {model['weights']} {model['dtype']} weights,",
        f"{model['num_hidden_layers']} layers, hidden size {model['hidden_size']}, vocabulary",
        f"{model['vocab_size']}, one MTP layer. The chart compares step times alone:",
        "acceptance is synthetic and the same for all,",
        f"{1 + sum(found['synthetic_acceptance']):.3f} tokens per step.",
    )


def throughput_chart() -> str:
    """The chart of the README: vLLM without MTP, with MTP and with the plugin."""
    found = result(NEWEST_FILE)
    panels = []
    for title, key in (("greedy", "greedy"), ("T = 0.6, top-p 0.95", "t0.6-p0.95")):
        rates = newest_rates(key)
        panels.append(
            Panel(
                title,
                [
                    Group(f"batch {batch}", "", [rates[name][i] for name in NEWEST.values()])
                    for i, batch in enumerate(found["batches"])
                ],
            )
        )
    return bar_chart(
        "vLLM 0.33 with MTP (K = 3): what the plugin adds",
        "tokens per second, relative to vLLM with MTP; batch: requests that run at the same time",
        list(NEWEST),
        panels,
    )


def when_it_pays() -> str:
    """Tokens per second over decoding without MTP, by batch size, for the guide."""
    rates = {"vLLM 0.33": _dense_over_off("vllm"), "vLLM 0.33 with the plugin": _dense_over_off()}
    rows = [
        [f"{name}, K = 3", *(f"{gain:.2f}" for gain in row.values())] for name, row in rates.items()
    ]
    found = result("vllm-0.24-throughput")["tokens_per_second"]
    gains = (on / found["off"]["mtp_plugin"][i] for i, on in enumerate(found["k3"]["mtp_plugin"]))
    rows.append(["embedded executor, K = 3", *(f"{gain:.2f}" for gain in gains)])
    for label, (name, case_name) in STEPS.items():
        if label != "K = 3":
            of_case = [speed_up(name, case_name, batch) for batch in E2E_BATCHES]
            rows.append([f"embedded executor, {label}", *(f"{gain:.2f}" for gain in of_case), "-"])
    batches = [f"batch {batch}" for batch in (*E2E_BATCHES, 128)]
    head = ["tokens per second over MTP off, greedy", *batches]
    long = [speed_up("e2e-8gb-long", "eagle-k3", batch) for batch in LONG_BATCHES]
    tokens = 1 + sum(result(NEWEST_FILE)["synthetic_acceptance"])
    group = idle_group(groups_of_steps(), "vllm", "plugin", "off")
    _, *quartiles = group["ratio_to_off"]["greedy"]["vllm"][-1]
    about = _text(
        f"One {_gpu(NEWEST_FILE)}, the model of the README, synthetic acceptance of {tokens:.3f}",
        "tokens per step with K = 3. Turns of batch 128 differ: the quartiles of vLLM's gain are",
        f"{' and '.join(f'{tokens / each:.2f}' for each in quartiles[::-1])}. The rows of the",
        "embedded executor are earlier results, the last two from another",
        "run. After prompts of 7,000 tokens, with K = 3 and 32,768 draft ids, it gains",
        f"{_each(long, 2)} at batch {_each(LONG_BATCHES, 0)}.",
    )
    return f"{_table(head, rows)}\n\n{about}"


SPARSE = "vllm-0.33-draft-lengths-sparse"
"""Tokens per second by K of a model with experts in every layer."""


def _dense_over_off(engine: str = "plugin") -> dict[int, float]:
    """Return tokens per second over those without MTP by batch, dense, greedy, K = 3."""
    found = result(NEWEST_FILE)
    tokens = 1 + sum(found["synthetic_acceptance"])
    ratios = idle_group(groups_of_steps(), "plugin", "off")["ratio_to_off"]["greedy"][engine]
    return {batch: tokens / each[0] for batch, each in zip(found["batches"], ratios, strict=True)}


def _sparse(prompts: str, routing: str) -> dict[Any, dict[int, float]]:
    """Return tokens per second by K, or "off", and batch."""
    rates: dict[Any, dict[int, float]] = {}
    for cell in result(SPARSE)["cells"]:
        if (cell["prompts"], cell["routing"]) == (prompts, routing):
            key = "off" if cell["engine"] == "off" else cell["k"]
            rates.setdefault(key, {})[cell["batch"]] = cell["tokens_per_second"]
    return rates


def _sparse_over_off(prompts: str = "short") -> dict[int, dict[int, float]]:
    """Return tokens per second over those without MTP, by K and batch."""
    rates = _sparse(prompts, "third")
    off = rates.pop("off")
    return {k: {n: row[n] / off[n] for n in row if n in off} for k, row in rates.items() if k}


def choose_k() -> str:
    """Gains over MTP off by K and batch, for the guide: dense models and sparse ones."""
    dense, sparse = _dense_over_off(), _sparse_over_off()
    batches = list(sparse[1])
    best = {batch: max(row[batch] for row in sparse.values()) for batch in batches}
    head = ["tokens per second over MTP off, greedy", *(f"batch {batch}" for batch in batches)]
    rows = [["dense, K = 3", *(f"{dense[n]:.2f}" if n in dense else "-" for n in batches)]]
    for k, row in sparse.items():
        cells = [f"**{row[n]:.2f}**" if row[n] == best[n] else f"{row[n]:.2f}" for n in batches]
        rows.append([f"sparse, K = {k}", *cells])
    long, rates = _sparse_over_off("16k"), result(SPARSE)["synthetic_acceptance"]
    likely, bound = _sparse("short", "third")[3], _sparse("short", "random")[3]
    others = [f"batch {n}: {', '.join(f'{long[k][n]:.2f}' for k in long)}" for n in long[1]]
    about = _text(
        f"One {_gpu(SPARSE)}, vLLM 0.33 with the plugin, bfloat16, random weights, synthetic",
        "acceptance of",
        f"{1 + sum(rates[:3]):.2f} tokens per step with K = 3 and {1 + sum(rates):.2f} with K = 7.",
        "Dense: the model of the README. Sparse: 24 layers of 128 experts, 8 per token, 33 GB.",
        "Each row of a request (a token to verify) shares a third of its experts with the",
        "row before it; if it shares none but by chance, which costs most, K = 3 gives",
        f"{', '.join(f'{bound[n] / likely[n]:.2f}' for n in batches)} of these tokens. After",
        f"prompts of 16,384 tokens sparse requests gain with K = 1, 3, 5, 7: {'; '.join(others)}.",
    )
    return f"{_table(head, rows)}\n\n{about}"


def draft_lengths_chart() -> str:
    """The chart of the guide: the gain of K = 3 by batch, dense and sparse."""
    gains = {"dense model": _dense_over_off(), "sparse model": _sparse_over_off()[3]}
    return bar_chart(
        "Three drafts (K = 3) in vLLM 0.33 with the plugin, dense and sparse models",
        "tokens per second over MTP off; batch: requests that run at the same time",
        ["K = 3"],
        [
            Panel(kind, [Group(str(batch), "", [gain]) for batch, gain in row.items()])
            for kind, row in gains.items()
        ],
    )


def which_method() -> str:
    """Acceptance length by verification method inside vLLM, for the guide."""
    engines = {
        "vLLM (greedy drafts, its default)": "vllm",
        "vLLM, `draft_sample_method: probabilistic`": "vllm_probabilistic",
        "plugin, `coupled`": "coupled",
        "plugin, `rejection`": "rejection",
        "plugin, `block`": "block",
    }
    found = result("vllm-0.33-methods")["methods"]
    rows = [
        [name, *(f"{each['acceptance_length']:.2f}" for each in found[engine].values())]
        for name, engine in engines.items()
    ]
    head = [
        "acceptance length, K = 3, trained tiny model, vLLM 0.33",
        "T = 0.8",
        "T = 0.8, top-p 0.95",
    ]
    probabilistic = " and ".join(f"{each:.3g}" for each in coupled_over("vllm_probabilistic"))
    greedy = " and ".join(f"{each:.2f}" for each in coupled_over("vllm"))
    about = _text(
        f"`coupled` has {greedy} times the tokens per step of vLLM's default, and {probabilistic}",
        "times those of its probabilistic drafts, which leave out top-p.",
    )
    return f"{_table(head, rows)}\n\n{about}"


def coupled_over(engine: str) -> list[float]:
    """Return tokens per step of `coupled` over those of another method, without and with top-p."""
    found = result("vllm-0.33-methods")["methods"]
    pairs = zip(found["coupled"].values(), found[engine].values(), strict=True)
    return [ours["acceptance_length"] / theirs["acceptance_length"] for ours, theirs in pairs]


def vllm_all() -> str:
    """All rows of tokens per second next to vLLM."""
    return f"{_throughput(tuple(VLLM))}\n"


def latency() -> str:
    """First tokens, gaps and start-up next to vLLM."""
    found = result("vllm-0.24-latency")

    def cells(values: Json) -> list[str]:
        theirs, ours = values["vllm"], values["mtp_plugin"]
        return [f"{theirs:.1f}", f"{ours:.1f} ({ours / theirs:.2f}x)"]

    rows = [
        [row, *cells(values["off"]), *cells(values["k3"])]
        for row, values in found["latency_ms"].items()
    ]
    head = ["milliseconds", "vLLM 0.24, MTP off", "mtp_plugin", "vLLM 0.24, K = 3", "mtp_plugin"]
    ready = found["ready_seconds"]["empty kernel caches"]
    warm = found["ready_seconds"]["mtp_plugin, warm cache, K = 3, at 8a56881"]
    about = _text(
        "vLLM and mtp_plugin ran on two H100s of one kind. Ready on empty kernel caches, batch",
        f"sizes 1 to 64: vLLM {ready['vllm_off']:.0f} s (MTP off) and {ready['vllm_k3']:.0f} s",
        f"(K = 3), mtp_plugin {ready['mtp_plugin_off']:.0f} s and {ready['mtp_plugin_k3']:.0f} s;",
        f"with a warm cache {warm:.0f} s (K = 3).",
    )
    return f"{_table(head, rows)}\n\n{about}"


def over_http() -> str:
    """Tokens per second over HTTP in the last round, in which no graph was captured."""
    found = result("serving-8gb")
    offline, http, stream = (
        found["tokens_per_second_of_runs"][mode][-1] for mode in ("offline", "http", "http-stream")
    )
    options = found["options"]
    return _text(
        f"One {found['machine']['gpu']}, {options['concurrency']} requests at a time of",
        f"{options['isl']} + {options['osl']} tokens, K = {options['k']}: `LLM.generate` outputs",
        f"{offline:,.0f} tokens per second, HTTP {http:,.0f} ({http / offline:.2f}x), streamed",
        f"{stream:,.0f} ({stream / offline:.2f}x).",
    )


def in_vllm() -> str:
    """The plugin inside vLLM: milliseconds of a step, acceptance length, equal outputs."""
    found, steps = result("vllm-0.24-plugin"), result("vllm-0.24-steps")
    engines = {
        "vLLM 0.24": "vllm",
        "vLLM, `draft_sample_method: probabilistic`": "vllm_probabilistic",
        "vLLM with the plugin": "mtp_plugin",
        "with `draft_vocab` of 32,768 ids": "mtp_plugin, draft_vocab 32768",
        "vLLM with the plugin, `rejection`": "mtp_plugin_rejection",
        "vLLM with the plugin, `block`": "mtp_plugin_block",
    }
    requests = {
        "greedy": "greedy",
        "T = 0.6, top-p 0.95": "t0.6-p0.95",
    }
    head = ["milliseconds of a step, K = 3", *(f"batch {size}" for size in steps["batches"])]
    rows = []
    for label, key in requests.items():
        step_ms = steps["step_ms"][key]
        for engine, name in engines.items():
            if name not in step_ms:
                continue
            cells = [
                f"{ms:.2f}" if name == "vllm" else f"{ms:.2f} ({ms / theirs:.2f}x)"
                for ms, theirs in zip(step_ms[name], step_ms["vllm"], strict=True)
            ]
            rows.append([f"{label}: {engine}", *cells])
    lengths = found["acceptance_length"]
    accepted = _table(
        ["acceptance length, trained tiny model", "T = 0.8", "T = 0.8, top-p 0.95"],
        [
            [engine, *(f"{lengths[key][name]:.2f}" for key in ("t0.8", "t0.8-p0.95"))]
            for engine, name in engines.items()
            if name in lengths["t0.8"]
        ],
    )
    same = [
        [where, *(f"{counts[key]} of 64" for key in ("greedy", "t0.8", "t0.8-p0.95"))]
        for where, counts in found["same_output"].items()
    ]
    equal = _table(
        ["equal outputs with the plugin", "greedy", "T = 0.8", "T = 0.8, top-p 0.95"], same
    )
    return f"{_table(head, rows)}\n\n{accepted}\n\n{equal}\n"


def in_newest_vllm() -> str:
    """The plugin inside the newest vLLM that was measured: step times, ratios and first tokens."""
    engines = {
        "vLLM 0.33": "vllm",
        "with the plugin": "plugin",
        "with `draft_vocab` of 32,768 ids": "draft_vocab",
        "vLLM, `draft_lm_head_quantization: fp8`": "vllm_fp8",
        "the same with the plugin": "plugin_fp8",
        "vLLM, `draft_sample_method: probabilistic`": "vllm_probabilistic",
        "vLLM 0.33 without MTP": "off",
    }
    groups = groups_of_steps()
    found: Json = {"batches": result(NEWEST_FILE)["batches"]}
    first: dict[str, list[float]] = {}
    for group in reversed(groups.values()):  # of an engine in several groups the first one is shown
        for kind in ("step_ms", "ratio", "kernels"):
            for key, of_engine in group.get(kind, {}).items():
                found.setdefault(kind, {}).setdefault(key, {}).update(of_engine)
        for name, each in group.get("arrivals", {}).items():
            first[name] = [turn["first_token_median"] for turn in each["turns"]]
    text = _text(
        "First token of 30 prompts of 384 tokens that arrive among 16 running requests, median of",
        f"each of three turns: vLLM {_each(first['vllm'], 1)} ms,",
        f"with the plugin {_each(first['plugin'], 1)} ms.",
        *(f"Under other load: group {name}." for name in groups if groups[name].get("busy")),
    )
    return f"{_steps(found, engines, found['ratio'])}\n\n{text}"


STEP_KINDS = {
    "greedy": "greedy",
    "T = 0.6, top-p 0.95": "t0.6-p0.95",
    "T = 0.6, top-p 0.95, three penalties": "t0.6-p0.95-penalties",
}


def _steps(found: Json, engines: dict[str, str], ratios: Json) -> str:
    """Return a table of step times.

    Args:
        found: ``step_ms`` by kind of requests, engine and batch; ``kernels`` where steps were
            traced.
        engines: name in the table -> name in the file; those that were not measured are left out.
        ratios: medians first, by kind of requests, engine and batch.
    """
    rows = []
    for label, key in STEP_KINDS.items():
        for engine, name in engines.items() if key in ratios else ():
            given = ratios[key].get(name)
            traces = found.get("kernels", {}).get(key, {}).get(name)
            cells = [
                f"{ms:.2f}"
                + (f" ({given[i][0]:.2f}x)" if given else "")
                + (f", kernels {traces[i]['kernel_ms']:.2f}" if traces and traces[i] else "")
                for i, ms in enumerate(found["step_ms"][key].get(name, []))
            ]
            if cells:
                rows.append([f"{label}: {engine}", *cells])
    head = ["milliseconds of a step, K = 3", *(f"batch {size}" for size in found["batches"])]
    return _table(head, rows)


def replay() -> str:
    """Tokens per second with a tail of copied text."""
    return f"{replay_table(result('vllm-0.33-replay'))}\n"


def replay_table(found: Json) -> str:
    """Return what `integration.vllm.replay` found: tokens per second, and acceptance lengths."""
    engines = {"k3": "K = 3", "k7": "K = 7", "tail": "3 + tail of 4"}
    head = ["texts, copied share", "batch", *engines.values(), "tail over the best K"]
    rows = [
        [
            f"{texts}, {found['copied_share'][texts]:.0%}",
            str(batch),
            *(
                f"{run[name]['tokens_per_s']:.0f} ({run[name]['acceptance_length']:.2f})"
                for name in engines
            ),
            f"{run['tail_over_best']:.2f}",
        ]
        for texts, of_batch in found["runs"].items()
        for batch, run in of_batch.items()
    ]
    return _table(head, rows)


SGLANG = ("0.5.17", "0.5.23")
_OTHERS = "K = 3, no overlap", "K = 3, two GPUs"


def of_sglang(what: str) -> dict[str, Json]:
    """Return the results of `integration.sglang.proof` or ``steps`` by version, of those that were
    measured."""
    names = {version: f"sglang-{version}-{what}" for version in SGLANG}
    return {v: result(name) for v, name in names.items() if (RESULTS / f"{name}.json").exists()}


def sglang_summary() -> str:
    """What README.md says of SGLang, in one line: its length is limited."""
    steps, proofs = of_sglang("steps"), of_sglang("proof")
    alone = "" if "0.5.23" in proofs else " (CPU alone)"
    reports = [r for found in proofs.values() for k in found["cases"].values() for r in k.values()]
    counts = {name: sum(each.get(name, 0) for each in reports) for name in _SAME}
    compared = sum(each["compared"] for each in reports)
    same = f"{sum(counts.values()):,} of {compared:,} " if reports else ""
    router = " and ties of the router" if counts["router_ties"] else ""
    sampled = " and ".join(
        " / ".join(f"{each[0]:.2f}" for each in found["ratio"]["t0.6-p0.95"]) + f" ({version})"
        for version, found in steps.items()
    )
    greedy = [each[0] for found in steps.values() for each in found["ratio"]["greedy"]]
    gpus = {found["machine"]["gpu"].removeprefix("NVIDIA ") for found in steps.values()}
    sentences = (
        f"**SGLang** {', '.join(SGLANG)}{alone} ([page](mtp_plugin/hosts/sglang/README.md)), MTP",
        "layers (EAGLE heads were not tried): seeds hold whatever K; `min_p`, drafts and relaxed",
        f"acceptance are options of a request. On one {', '.join(sorted(gpus))} {same}outputs are",
        f"those without drafts, up to near ties{router}; sampled steps take {sampled} of SGLang's",
        f"time at batch 1 / 8 / 64, greedy ones {min(greedy):.2f} to {max(greedy):.2f}.",
    )
    return " ".join(sentences) + "\n"


_SAME = ("equal", "ties", "router_ties")


def _outputs(report: Json | None) -> str:
    """Return a cell: equal outputs, near ties, and what else there is."""
    if report is None:
        return "-"
    router = report.get("router_ties")
    return (
        f"{report['equal']} + {report['ties']} of {report['compared']}"
        + (f", {router} of the router" if router else "")
        + (f", {report['different']} other" if report["different"] else "")
    )


def in_sglang() -> str:
    """The plugin inside SGLang: equal outputs and step times."""
    head, columns = [], []
    for version, found in of_sglang("proof").items():
        more = {"random requests": found.get("random", {})}
        more |= {name: {"k3": found[name]} for name in ("storm", "soak") if name in found}
        rows = found["cases"] | more
        for engine in ("k3", "k1"):
            head.append(f"{version}, K = {engine[1]}")
            columns.append({name: row.get(engine) for name, row in rows.items()})
        head.append(f"{version}, embedded executor")
        columns.append(found.get("executor", {}))
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[n.replace("_", " "), *(_outputs(each.get(n)) for each in columns)] for n in names]
    outputs = _table(["outputs of K = 0: equal + near ties", *head], rows) if head else ""
    engines = {
        version: {f"SGLang {version}": "sglang", f"{version} with the plugin": "plugin"}
        for version in SGLANG
    }
    steps = [
        _steps(
            found, engines[version], {key: {"plugin": each} for key, each in found["ratio"].items()}
        )
        + ("\n\nOther processes took CPU time (`busy`)." if found.get("busy") else "")
        for version, found in of_sglang("steps").items()
    ]
    return "\n\n".join(filter(None, [outputs, *steps])) + "\n"


def in_earlier_sglang() -> str:
    """Outputs of earlier commits, also without overlap scheduling and on two GPUs."""
    found = result("sglang-0.5.17-earlier")
    latest = found["third_run"]
    others = latest["overlap_off"], latest["tensor_parallel"]
    reports = {
        name.replace("_", " "): (
            row["k3"],
            row["k1"],
            *(other["cases"].get(name, {}).get("k3") for other in others),
            found["executor"].get(name),
        )
        for name, row in latest["cases"].items()
    }
    random, serial = latest["random"], others[0]
    reports["random requests"] = random["k3"], random["k1"], serial["random"]["k3"], None, None
    reports["storm"] = latest["storm"], None, serial["storm"], None, None
    return (
        _table(
            [
                "outputs of K = 0: equal + near ties",
                "K = 3",
                "K = 1",
                *_OTHERS,
                "embedded executor",
            ],
            [[name, *map(_outputs, row)] for name, row in reports.items()],
        )
        + "\n"
    )


def sglang_files() -> str:
    """Names of the files, for their list."""
    names = ", ".join(f"`{path.name}`" for path in sorted(RESULTS.glob("sglang-*.json")))
    page = "../../mtp_plugin/hosts/sglang/README.md#on-a-gpu"
    return _text(f"{names}: [the plugin inside SGLang]({page}).")


def step_times() -> str:
    """Milliseconds of a step next to vLLM, of an earlier run."""
    found = result("vllm-0.24")
    head = [
        f"milliseconds of a step, batch {' / '.join(map(str, found['batches']))}",
        "vLLM 0.24",
        "mtp_plugin",
        "vLLM / mtp_plugin",
    ]
    rows = []
    for row, key in (("MTP off", "off"), ("K = 1", "k1"), ("K = 3", "k3")):
        theirs, ours = (found["step_ms"][key][engine] for engine in ("vllm", "mtp_plugin"))
        ratios = [slow / fast for slow, fast in zip(theirs, ours, strict=True)]
        rows.append([row, *(_each(each, 2) for each in (theirs, ours, ratios))])
    return f"{_table(head, rows)}\n"


KINDS = {
    "`temperature` 0.6, `top_p` 0.95, `top_k` 20": "sampled",
    "the same, with the logprob of each token": "sampled-logprob",
    "the same, with the top 5 logprobs": "sampled-top5",
    "the same, with a repetition penalty": "sampled-penalty",
    "one sampled request among greedy ones": "one-sampled",
}


def request_kinds() -> str:
    """Step time by kind of requests."""

    def over_greedy(kind: str, batch: int) -> str:
        if kind == "one-sampled" and batch == 1:
            return "-"
        name, label = "e2e-8gb-request-kinds", f"eagle-k3/b{batch}"
        greedy = case(name, label)["step_ms"]["median"]
        return f"{of_kind(name, label, kind)['step_ms']['median'] / greedy:.3f}"

    head = ["requests", "step time / greedy, batch 1 / 8 / 64"]
    rows = [
        [row, " / ".join(over_greedy(kind, batch) for batch in E2E_BATCHES)]
        for row, kind in KINDS.items()
    ]
    return _table(head, rows) + "\n"


def tiny_model() -> str:
    """Ratios within one run; absolute numbers depend on the CPU."""
    name = "e2e-tiny_model"

    def rate(label: str) -> float:
        return float(case(name, label)["steady_tokens_per_second"])

    found, ratio = result(name), rate("eagle-k3/b1") / rate("off/b1")
    return _text(
        f"The tiny model ({found['model']['dtype']}, greedy, {found['input_tokens']} input and",
        f"{found['output_tokens']} output tokens, real acceptance) decodes {ratio:.1f} times",
        "as many tokens per second with K = 3 as without MTP at batch 1.",
    )


METHODS = {
    "`coupled`": "coupled",
    "`rejection`": "rejection",
    "`block`": "block",
    "greedy drafts": "greedy-drafts",
}
METHODS_FILE, METHODS_BATCH = "e2e-tiny_model-sampled", 16


def of_methods(temperature: str, methods: Sequence[str] = tuple(METHODS.values())) -> list[Json]:
    """Results of verification methods at a temperature, for both workers."""
    return [
        of_kind(METHODS_FILE, f"{worker}-k3/b{METHODS_BATCH}", f"{method}-t{temperature}")
        for worker in ("eagle", "vanilla")
        for method in methods
    ]


def _lengths_and_rate(found: Json) -> str:
    return f"{found['acceptance_length']:.2f} / {found['steady_tokens_per_second']:.0f}"


def methods() -> str:
    """Tokens per step and per second by verification method."""
    found = result(METHODS_FILE)
    temperatures = ("0.6", "1.0")
    head = [
        "tokens per step / per second",
        *(f"{w}, {t}" for w in ("eagle", "vanilla") for t in temperatures),
    ]
    rows = []
    for row, method in METHODS.items():
        by_temperature = [of_methods(temperature, [method]) for temperature in temperatures]
        cells = [each for worker in zip(*by_temperature, strict=True) for each in worker]
        rows.append([row, *map(_lengths_and_rate, cells)])
    every = {t: of_methods(t) for t in temperatures}
    steps = [METHODS_BATCH * each["step_ms"]["samples"] for t in temperatures for each in every[t]]
    repeated = {
        t: [each["share_of_repeated_8_grams"] for each in cases] for t, cases in every.items()
    }
    low, high = (f"{min(repeated[t]):.0%} to {max(repeated[t]):.0%}" for t in temperatures)
    where = _text(
        f"Batch {METHODS_BATCH}, {found['input_tokens']} input and {found['output_tokens']} output",
        f"tokens, {found['model']['dtype']} on a {found['model']['device'].split(':')[0].upper()};",
        "columns: worker and temperature.",
    )
    samples = _text(
        f"Each number is measured over {round(min(steps), -1)} to {round(max(steps), -1)} steps of",
        f"one request. At temperature 0.6 {low} of the 8-grams repeat, which raises the acceptance",
        f"of every method; at 1.0 {high}.",
    )
    return f"{where}\n{_table(head, rows)}\n\n{samples}"


def soak() -> str:
    """Results of the soak test."""
    found, shorter = result("soak-tiny_model"), result("soak-tiny_model-15min")
    counts = found["counts"]
    checks = found.get("results") or found["checks"]  # newer files, older files
    thirds = next(each for each in checks if each["name"] == "acceptance length by third")
    return _text(
        f"{found['options']['seconds'] / 60:.0f} minutes of random traffic on the GPU in",
        f"{found['model']['dtype']}: {counts['requests']} requests, {counts['aborted']} of them",
        f"aborted, {counts['preemptions']} preemptions. All {counts['tokens']} tokens equal",
        "those of target-only decoding; no block, slot or memory leaked. The acceptance length in",
        f"thirds of the run is {thirds['found']}. The same holds for a run of",
        f"{shorter['options']['seconds'] / 60:.0f} minutes with later code",
        f"(`soak-tiny_model-15min.json`, {shorter['counts']['tokens']} tokens).",
    )


KERNELS = {
    "whole step, vanilla (`chain: output`, exact window)": ("step", "step/vanilla"),
    "whole step, eagle": ("step", "step/eagle"),
    "whole step, vanilla, `target_shift`": ("step", "step/vanilla-target-shift"),
    "acceptance, strict": ("ops", "accept/strict"),
    "acceptance, relaxed, all requests thinking": ("ops", "accept/relaxed"),
    "history and draft inputs of generation requests": ("ops", "first-pass/vanilla"),
}


def kernels() -> str:
    """Parts of a step next to TensorRT-LLM's torch path."""
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
        "part of a step, microseconds in a CUDA graph",
        "batch 1 / 8 / 64 / 256",
        "launches",
        "TensorRT-LLM's torch path",
    ]
    mixed = case("ops", "first-pass/mixed/b64")["graph_us"]["median"]
    copied = case("ops", "state-copy/b64")["gb_per_s"]
    others = _text(
        "History and draft inputs of a mixed batch (4 prompts of 2048 tokens, 60 generations)",
        f"take {mixed:.0f} us; the recurrent-state copy moves {copied:.0f} GB/s.",
    )
    return f"{_table(head, rows)}\n\n{others}"


SAMPLING = {
    "argmax": "greedy",
    "temperature": "temperature",
    "with the log-sum-exp that logprobs need": "temperature-logprobs",
    "top-k 50, top-p 0.9": "top-k-top-p",
    "with the log-sum-exp": "top-k-top-p-logprobs",
    "top-k 20, top-p 0.95, temperature 0.6, peaked rows": "top-k-top-p-peaked",
    "top-p 0.95, peaked rows": "top-p-peaked",
    "top-p 0.95, flat rows": "top-p",
    "top-k 1000, top-p 0.95, flat rows": "many-top-k",
    "top-k 50, top-p 0.9 in a step that processes logits": "top-k-top-p-with-edits",
    "the same with a logit bias": "top-k-bias",
    "with allowed token ids": "top-k-allowed",
    "with penalties": "top-k-penalties",
}


def sampling() -> str:
    """Time of sampling."""
    head = [
        "sampling, microseconds in a CUDA graph, including acceptance",
        "batch 1 / 8 / 64 / 256",
    ]
    rows = [[row, _microseconds("ops-draws", f"draw/{label}")] for row, label in SAMPLING.items()]
    return f"{_table(head, rows)}\n"


RELAXED_FILE = "relaxed-thinking_model"


def _method(row: Json) -> str:
    """Name of a row of relaxed acceptance."""
    name = f"relaxed, {row['topk']}, {row['delta']:g}" if row["topk"] else str(row["setting"])
    return f"{name}, T = {row['temperature']:g}" if row["temperature"] else name


def relaxed() -> str:
    """Accuracy and acceptance length of relaxed acceptance."""
    found = result(RELAXED_FILE)
    machine, model, lossless = found["machine"], found["model"], found["lossless"]
    head = [
        "verification (relaxed: `relaxed_topk`, `relaxed_delta`)",
        "correct answers",
        "difference to lossless",
        "acceptance length",
    ]
    rows = [
        [
            _method(row),
            f"{row['accuracy']:.1%} +- {row['accuracy_margin']:.1%}",
            f"{row['difference']:+.1%} +- {row['difference_margin']:.1%}" if row["topk"] else "",
            f"{row['acceptance_length']:.2f}",
        ]
        for row in found["settings"]
    ]
    ties = " and ".join(f"{lossless[name]['ties']} ({name})" for name in ("strict", "coupled"))
    about = _text(
        f"{found['problems']:,} held-out problems on one {machine['gpu'] or machine['cpu']},",
        f"torch {machine['torch']}, {model['dtype']}, batch {model['batch']}, K = 3; intervals of",
        "95 %, those of differences from the same problems. Outputs of strict and coupled",
        "verification equal those without drafts; outputs that differ by a rounding tie of two",
        f"tokens: {ties}.",
    )
    return f"{_table(head, rows)}\n\n{about}"


def thinking_tasks() -> str:
    """Correct answers by kind of problem."""
    rows = result(RELAXED_FILE)["settings"]
    tasks = list(rows[0]["accuracy_by_task"])
    cells = [
        [_method(row), *(f"{row['accuracy_by_task'][task]:.1%}" for task in tasks)] for row in rows
    ]
    return f"{_table(['correct answers', *tasks], cells)}\n"


def relaxed_chart() -> str:
    """Accuracy against acceptance length."""
    rows = [row for row in result(RELAXED_FILE)["settings"] if row["drafts"]]

    def points(sampled: bool) -> list[Point]:
        return [
            Point(
                _method(row).removeprefix("relaxed, "),
                row["acceptance_length"],
                row["accuracy"],
                row["accuracy_margin"],
            )
            for row in rows
            if bool(row["temperature"]) == sampled
        ]

    return point_chart(
        "Relaxed acceptance: correct answers and acceptance length (K = 3)",
        "verification (relaxed: relaxed_topk, relaxed_delta), and acceptance length",
        "correct answers, 95 % intervals",
        (points(False), points(True)),
    )


CHARTS: dict[Path, Callable[[], str]] = {
    RESULTS / "throughput.svg": throughput_chart,
    RESULTS / "relaxed.svg": relaxed_chart,
    RESULTS / "draft-lengths.svg": draft_lengths_chart,
    ROOT / "docs" / "step.svg": step_diagram,
}


BLOCKS: dict[str, Callable[[], str]] = {
    "throughput": throughput,
    "throughput-setting": throughput_setting,
    "when-it-pays": when_it_pays,
    "choose-k": choose_k,
    "which-method": which_method,
    "speed": speed,
    "long-prompts": long_prompts,
    "vllm": vllm_all,
    "latency": latency,
    "over-http": over_http,
    "vllm-steps": step_times,
    "in-vllm": in_vllm,
    "in-vllm-newest": in_newest_vllm,
    "sglang-summary": sglang_summary,
    "in-sglang": in_sglang,
    "in-earlier-sglang": in_earlier_sglang,
    "sglang-files": sglang_files,
    "replay": replay,
    "request-kinds": request_kinds,
    "tiny-model": tiny_model,
    "methods": methods,
    "soak": soak,
    "kernels": kernels,
    "sampling": sampling,
    "relaxed": relaxed,
    "thinking-tasks": thinking_tasks,
}


def rendered(text: str) -> str:
    """Return a page with its blocks written from the result files."""
    return _BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}{found[3]}", text)


def named_blocks(text: str) -> list[str]:
    """Return the names of a page's blocks."""
    return [found[2] for found in _BLOCK.finditer(text)]


def main() -> None:
    """Rewrite the pages and the charts."""
    for page in PAGES:
        page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")
    for path, chart in CHARTS.items():
        path.write_text(chart(), encoding="utf-8")


if __name__ == "__main__":
    main()
