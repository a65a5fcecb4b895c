"""What a tail of copied text gains: ``python -m integration.vllm.replay --json FILE``.

Replay: a given text is the target's output, whatever the weights, so that matches in it are real.
Drafts of the MTP layers are right by given rates, those of tokens that copy by ``--copied``. Target
and draft layers run as ever: only their logits and drafts are replaced, by the same few launches in
all engines. Engines take turns: K = 3, K = 7, and 3 drafts with a tail of 4.

Three sets of texts, from the standard library: ``edits``, a file written again with a quarter of
its lines changed; ``quotes``, prose that quotes its prompt; ``prose``, which copies nothing. In
every turn the tail is compared with the better K of all turns. Exit code 1: an output is not its
text, or on a GPU a median of these ratios is below ``GOALS``.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import statistics
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from integration.bench.machine import describe_machine, load_of_others, store
from integration.figures import replay_table
from integration.shapes import ACCEPTANCE, vllm_config, write_config
from integration.vllm.engine_process import (
    EngineProcess,
    add_common_options,
    engine_settings,
    has_gpu,
    measured,
    prepare,
    wait_for,
    write_one_mtp_layer,
)
from integration.vllm.requests import acceptance_length, counters, sampling_params

SHAPE = vllm_config("8gb")
ENGINES: dict[str, dict[str, Any]] = {
    "k3": {"num_drafts": 3, "plugin": {}},
    "k7": {"num_drafts": 7, "plugin": {}},
    "tail": {"num_drafts": 7, "plugin": {"tail": {"ngram": 4}}},
}
GOALS = {"edits": 1.20, "quotes": 1.05, "prose": 0.98}
"""Sets of texts -> tokens per second of the tail over those of the best K, at each batch."""
MATCH = 6
KEY = "replay"
"""In ``extra_args`` of a request: its ``tokens``, and the ``right`` drafts of each, as bits."""
WIDTH = 8192
START_LIMIT, LIMIT = 300.0, 120.0
"""Seconds until the engines are ready, and of one batch."""


# ---- texts


def ids_of(text: str, vocab: int) -> list[int]:
    """Return token ids of a text: words of at most 6 letters, spaces and signs."""
    pieces = re.findall(r"\w{1,6}|\s+|[^\w\s]", text)
    return [2 + zlib.crc32(piece.encode()) % (vocab - 3) for piece in pieces]


def make_texts(name: str, count: int, isl: int, osl: int, vocab: int) -> list[dict[str, Any]]:
    """Return ``count`` pairs of ``prompt`` and ``output``, of about ``isl`` and ``osl`` tokens."""
    rng = random.Random(name)
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))
    sources = [file.read_text(encoding="utf-8") for file in files if file.name != "this.py"]
    docs = [
        ast.get_docstring(node) or ""
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]
    rng.shuffle(docs)
    words = ids_of("\n".join(dict.fromkeys(docs)), vocab)
    long = [source for source in sources if len(source) > 6 * (isl + osl)]
    texts = []
    for number in range(count):
        start = number * (isl + 2 * osl) % (len(words) - isl - 2 * osl)
        prompt, new = words[start : start + isl], words[start + isl : start + isl + 2 * osl]
        if name == "edits":
            lines = long[number % len(long)].splitlines(keepends=True)
            lines = lines[number // len(long) :]
            prompt = ids_of("".join(lines), vocab)[:isl]
            edited = [_changed(line, rng) if rng.random() < 1 / 4 else line for line in lines]
            new = ids_of("".join(edited), vocab)
        elif name == "quotes":
            parts: list[int] = []
            while len(parts) < osl:
                at = rng.randrange(max(1, isl - 30))
                parts += [*new[:45], *prompt[at : at + 30]]
                new = new[45:]
            new = parts
        else:  # repeated phrases are left out
            flags = copied(prompt, new)
            new = [token for token, is_copy in zip(new, flags, strict=True) if not is_copy]
        texts.append({"prompt": prompt, "output": new[:osl]})
    return texts


def _changed(line: str, rng: random.Random) -> str:
    """Return a line with another name in it, and at times one line more."""
    indent = line[: len(line) - len(line.lstrip())]
    changed = re.sub(r"\w+", lambda _: f"name{rng.randrange(1000)}", line, count=2)
    more = f"{indent}check(value{rng.randrange(1000)}, {rng.randrange(1000)})\n"
    return changed + more * (rng.random() < 0.3)


def copied(prompt: Sequence[int], output: Sequence[int]) -> list[bool]:
    """Return which tokens of an output are those that followed its last `MATCH` tokens before."""
    text, seen, found = [*prompt, *output], {}, []
    for end in range(1, len(text)):
        if end >= MATCH:
            key = tuple(text[end - MATCH : end])
            if end >= len(prompt):
                found.append(seen.get(key) == text[end])
            seen[key] = text[end]
    return found


def right_drafts(flags: Sequence[bool], rate: float, seed: int) -> list[int]:
    """Return which drafts of each token are right, draft i as bit i.

    Args:
        flags: which tokens copy. rate: of their drafts; of others the rates are those of
            `ACCEPTANCE`, given that the drafts before are right.
    """
    rng = random.Random(seed)
    rates = [now / before for before, now in zip([1.0, *ACCEPTANCE], ACCEPTANCE, strict=False)]
    return [
        sum((rng.random() < (rate if flag else own)) << bit for bit, own in enumerate(rates))
        for flag in flags
    ]


# ---- in the engine


def patch() -> None:
    """Replace what the plugin samples; an entry point, which vLLM calls in every process."""
    from mtp_plugin.speculative.rows.row_ops import RowOps

    if hasattr(RowOps, KEY):
        return
    init = RowOps.__init__
    sample, verify, sample_drafts = RowOps.sample, RowOps.verify, RowOps.sample_drafts

    def init_(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        table = self.slots.table
        shape = (self.num_drafts + 1, len(table), WIDTH)  # the text, then the drafts of each column
        setattr(self, KEY, torch.full(shape, 2, dtype=torch.int64, device=table.device))
        from mtp_plugin.hosts.vllm.sampler import PluginSampler  # front ends do not load it

        if not hasattr(PluginSampler, KEY):
            setattr(PluginSampler, KEY, PluginSampler.add_request)
            PluginSampler.add_request = add_

    def add_(self: Any, req_idx: int, params: Any) -> None:
        getattr(self, KEY)(req_idx, params)
        given = (params.extra_args or {}).get(KEY)
        if given is None:
            return
        tables, first = getattr(self.ops, KEY), int(self.req_states.prompt_len.np[req_idx])
        text = torch.tensor(given["tokens"])
        bits = torch.arange(len(tables) - 1).unsqueeze(1)
        is_right = torch.tensor(given["right"]) >> bits & 1
        rows = torch.cat([text.unsqueeze(0), torch.where(is_right > 0, text, text + 1)])
        tables[:, req_idx, first : first + len(text)] = rows.to(tables.device)

    def push(self: Any, logits: Any, indices: Any, positions: Any) -> None:
        tokens = getattr(self, KEY)[0, indices.to(torch.int64), positions.to(torch.int64) + 1]
        logits.scatter_(1, tokens.unsqueeze(1), 1e4)

    def sample_(self: Any, logits: Any, indices: Any, positions: Any, *more: Any) -> Any:
        push(self, logits, indices, positions)
        return sample(self, logits, indices, positions, *more)

    def verify_(self: Any, step: Any) -> Any:
        push(self, step.logits, step.row_indices, step.positions)
        return verify(self, step)

    def sample_drafts_(self: Any, draft: Any) -> Any:
        sample_drafts(self, draft)
        column = draft.step.to(torch.int64).view(1) + 1  # as a scalar the host would read it
        positions = (draft.positions + 1).clamp_max(WIDTH - 1)  # those of padding are any
        return getattr(self, KEY)[column, draft.indices, positions]

    replaced = {"__init__": init_, "sample": sample_, "verify": verify_, KEY: None}
    for name, function in {**replaced, "sample_drafts": sample_drafts_}.items():
        setattr(RowOps, name, function)


def run_texts(llm: Any, *, texts: list[dict[str, Any]]) -> dict[str, Any]:
    """Run one batch until its first request ends; tokens per second count from the step in which
    all generate."""
    from vllm.sampling_params import RequestOutputKind

    engine, before = llm.llm_engine, counters(llm)
    for number, text in enumerate(texts):
        params = sampling_params(
            {
                "temperature": 0.0,
                "ignore_eos": True,
                "detokenize": False,
                "max_tokens": len(text["output"]),
                "extra_args": {KEY: {"tokens": text["output"], "right": text["right"]}},
            }
        )
        params.output_kind = RequestOutputKind.DELTA
        engine.add_request(str(number), {"prompt_token_ids": text["prompt"]}, params)
    tokens: list[list[int]] = [[] for _ in texts]
    start, emitted, steps, finished = None, 0, 0, False
    while not finished:
        new = 0
        for output in engine.step():
            given = list(output.outputs[0].token_ids)
            tokens[int(output.request_id.split("-")[0])] += given
            new += len(given)
            finished |= output.finished
        if start is not None:
            emitted, steps = emitted + new, steps + bool(new)
        elif all(tokens):
            start = time.perf_counter()
    seconds = time.perf_counter() - (start or 0)
    engine.abort_request([str(number) for number in range(len(texts))])
    while engine.has_unfinished_requests():
        engine.step()
    equal = [got == text["output"][: len(got)] for got, text in zip(tokens, texts, strict=True)]
    return {
        "tokens_per_s": emitted / seconds,
        "step_ms": 1000 * seconds / max(steps, 1),
        "acceptance_length": acceptance_length(before, counters(llm)),
        "num_equal": sum(equal),
    }


# ---- the measurement


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--isl", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--osl", type=int, default=768, help="tokens of an output")
    parser.add_argument(
        "--copied", type=float, default=0.9, help="rate of right MTP drafts of tokens that copy"
    )
    parser.add_argument("--start-seconds", type=float, default=START_LIMIT)
    add_common_options(parser)
    return parser.parse_args()


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start all engines, then let them take turns; runs are stored as they come."""
    on_gpu = has_gpu()
    prepare(folder, on_gpu, {"replay": "integration.vllm.replay:patch"})
    batches = [int(batch) for batch in options.batches.split(",")]
    found: dict[str, Any] = {
        "kind": "replay",
        "name": "vllm-replay-8gb",
        "complete": False,
        "matched": False,
        "reached": False,
        "goals": GOALS,
        "machine": describe_machine(torch.device("cuda" if on_gpu else "cpu")),
        "acceptance": ACCEPTANCE,
        **{name: getattr(options, name) for name in ("turns", "isl", "osl", "copied")},
        "engines": {},
        "copied_share": {},
        "runs": {},
    }
    engines: dict[str, EngineProcess] = {}
    try:
        for name in ENGINES:
            engines[name] = _start(name, options, max(batches), folder, on_gpu)
        vocab = SHAPE["vocab_size"] if on_gpu else 2048
        texts: dict[str, list[dict[str, Any]]] = {}
        for name in GOALS:
            texts[name] = make_texts(name, max(batches), options.isl, options.osl, vocab)
            shares = []
            for seed, text in enumerate(texts[name]):
                flags = copied(text["prompt"], text["output"])
                text["right"] = right_drafts(flags, options.copied, seed)
                shares += flags
            found["copied_share"][name] = round(statistics.mean(shares), 3)
        for name, engine in engines.items():
            found["engines"][name] = engine.wait_until_ready(options.start_seconds)
        wait_for(options.wait)
        for batch in batches:
            for name in GOALS:
                first = 0 if name == "edits" else 1  # turn 0 compiles and does not count
                run = _take_turns(engines, texts[name][:batch], range(first, options.turns + 1))
                found["runs"].setdefault(name, {})[batch] = run
                every = [(of, run) for of, runs in found["runs"].items() for run in runs.values()]
                found["matched"] = all(run["matched"] for _, run in every)
                found["reached"] = all(run["tail_over_best"] >= GOALS[of] for of, run in every)
                store(options.json, found)
                sys.stdout.write(f"{_shown(name, batch, run)}\n")
                sys.stdout.flush()
    finally:
        for engine in engines.values():
            engine.close()
    found["complete"] = True
    store(options.json, found)
    return found


def _start(
    name: str, options: argparse.Namespace, most: int, folder: Path, on_gpu: bool
) -> EngineProcess:
    given = ENGINES[name]
    settings: dict[str, Any] = {
        "max_num_seqs": max(2, most),
        "max_model_len": options.isl + options.osl + 16,
        "skip_tokenizer_init": True,
    }
    if on_gpu:
        rows = {2**n for n in range(10)} | {most * (k + 1) for k in (3, 7)}
        settings |= {
            "model": write_config(folder / "model", SHAPE),
            "load_format": "dummy",
            "dtype": SHAPE["torch_dtype"],
            "max_num_batched_tokens": 8192,
            "compilation_config": {"cudagraph_capture_sizes": sorted(rows)},
            "gpu_memory_utilization": 0.1,
            "kv_cache_memory_bytes": 6 << 30,
        }
    else:
        settings["model"] = write_one_mtp_layer(folder / "one_mtp_layer")
    made = engine_settings(given["num_drafts"], on_gpu, given["plugin"], **settings)
    made.pop("attention_backend", None)
    return EngineProcess(name, made, folder, in_process=not on_gpu)


def _take_turns(
    engines: dict[str, EngineProcess], texts: list[dict[str, Any]], turns: range
) -> dict[str, Any]:
    """Return the medians of every engine but of turn 0, and that of the ratios of the turns with
    quartiles; ``matched``: every output is its text."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    is_equal = True
    for turn in turns:
        for name in [*engines][:: -1 if turn % 2 else 1]:
            got = engines[name].call(run_texts, LIMIT, texts=texts)
            is_equal &= got["num_equal"] == len(texts)
            if turn:
                runs[name].append(got)
    result: dict[str, Any] = {
        name: {key: round(statistics.median(run[key] for run in each), 3) for key in each[0]}
        for name, each in runs.items()
    }
    best = max(runs.keys() - {"tail"}, key=lambda name: result[name]["tokens_per_s"])
    low, middle, high = statistics.quantiles(
        [
            ours["tokens_per_s"] / theirs["tokens_per_s"]
            for ours, theirs in zip(runs["tail"], runs[best], strict=True)
        ],
        n=4,
        method="inclusive",
    )
    return {
        **result,
        "best": best,
        "tail_over_best": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "load": round(load_of_others(), 3),
        "matched": is_equal,
    }


def _shown(name: str, batch: int, run: dict[str, Any]) -> str:
    low, high = run["quartiles"]
    return (
        f"{name}, batch {batch}: tail over {run['best']} {run['tail_over_best']:.3f} ({low:.3f} to "
        f"{high:.3f}), goal {GOALS[name]:.2f}; load of other processes {run['load']}"
    )


def main() -> int:
    """Measure, and print tokens per second and acceptance lengths; returns the exit code."""
    options = arguments()
    found = measured(measure, options)
    if found is None:
        return 1
    lines = [
        replay_table(found),
        *(_shown(name, *each) for name, runs in found["runs"].items() for each in runs.items()),
        f"goals reached: {'yes' if found['reached'] else 'no'}",
        "matched" if found["matched"] else "FAILED: an output is not its text",
    ]
    sys.stdout.write("\n".join([*lines, ""]))
    return 0 if found["matched"] and (found["reached"] or not has_gpu()) else 1


if __name__ == "__main__":
    sys.exit(main())
