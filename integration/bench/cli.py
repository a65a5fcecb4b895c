"""``python -m integration.bench ops``, ``e2e`` and ``soak``."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from pathlib import Path
from typing import Any


def main() -> None:
    """Run the command line; a named error is printed as one line, with exit code 2."""
    from mtp_plugin.tools.terminal.console import run_to_the_end

    def command() -> None:
        given = parser().parse_args()
        raise SystemExit(given.run(given))

    run_to_the_end(command)


def parser() -> argparse.ArgumentParser:
    """Return the parser; exit code 1 of a command: a result differs from the reference."""
    whole = argparse.ArgumentParser(prog="python -m integration.bench", description=__doc__)
    commands = whole.add_subparsers(required=True)

    ops = commands.add_parser("ops", help="time single ops and a worker's step with an empty model")
    ops.set_defaults(run=_ops)
    ops.add_argument("--batch", dest="batches", type=_integers, help="batch sizes N,N")
    ops.add_argument("--filter", dest="only", help="only cases whose name contains this")
    ops.add_argument("--cpu", action="store_true", help="compare tiny shapes, without times")

    e2e = commands.add_parser("e2e", help="decode whole batches with and without MTP")
    e2e.set_defaults(run=_e2e)
    _add_model(e2e, with_shape=True)
    e2e.add_argument("--batch", dest="batches", type=_integers, help="batch sizes N,N")
    e2e.add_argument("--k", dest="ks", type=_integers, help="draft lengths N,N")
    e2e.add_argument("--worker", dest="workers", type=_names, help="eagle, vanilla")
    e2e.add_argument("--isl", type=int, help="tokens of each prompt")
    e2e.add_argument("--osl", type=int, help="output tokens of each request")
    e2e.add_argument(
        "--acceptance",
        type=_rates,
        help="synthetic acceptance: one rate per draft, or the share of steps that accept drafts "
        "1..i for each i; default: real for a checkpoint, 0.8 for a shape",
    )
    e2e.add_argument("--draft-vocab", type=int, help="number of token ids that may be drafted")
    _add_kinds(e2e)

    soak = commands.add_parser("soak", help="run random traffic, then check for leaks and outputs")
    soak.set_defaults(run=_soak)
    _add_model(soak, with_shape=False)
    soak.add_argument("--seconds", type=float, help="seconds during which requests arrive")
    soak.add_argument("--steps", type=int, help="number of steps instead, for a reproducible run")
    soak.add_argument("--worker", choices=("eagle", "vanilla"))
    soak.add_argument("--k", type=int, help="draft length")
    soak.add_argument("--batch-size", type=int, help="requests per step")
    _add_kinds(soak)
    for each in (ops, e2e, soak):
        each.add_argument("--output", type=Path, help="JSON file of the results")
    return whole


def _add_model(command: argparse.ArgumentParser, *, with_shape: bool) -> None:
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", type=Path, help="checkpoint; acceptance is real")
    if with_shape:
        which.add_argument("--shape", help="random weights: 8gb, sparse, toy")
    command.add_argument("--dtype", help="float32, bfloat16 or float16")
    command.add_argument("--device", default="auto", help="auto, cuda or cpu")
    command.add_argument("--seed", type=int)
    command.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True)


def _add_kinds(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--ask",
        dest="kinds",
        type=_names,
        help="kinds of requests: greedy, sampled, sampled-logprob, sampled-top5, sampled-penalty, "
        "one-sampled; coupled, rejection, block or greedy-drafts with -t0.6 or -t1.0",
    )


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _rates(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _options(kind: Any, given: argparse.Namespace) -> Any:
    """Return the options of a data class; those that were not given keep their default."""
    values = {each.name: getattr(given, each.name, None) for each in fields(kind)}
    return kind(**{name: value for name, value in values.items() if value is not None})


def _ops(given: argparse.Namespace) -> int:
    if given.cpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from integration.bench.ops import OpsOptions, run

    return run(_options(OpsOptions, given))


def _subject(given: argparse.Namespace) -> Any:
    from integration.bench.e2e.subject import load_checkpoint, make_shape
    from mtp_plugin.hosts.embedded.resolved_config import resolve_device

    device = resolve_device(given.device)
    fused = device.type == "cuda"
    if given.model is not None:
        return load_checkpoint(given.model, device, given.dtype, fused=fused)
    return make_shape(given.shape, device, given.dtype, given.seed or 0, fused=fused)


def _e2e(given: argparse.Namespace) -> int:
    from integration.bench.e2e.cases import E2EOptions, check_kinds
    from integration.bench.e2e.run import run

    options = _options(E2EOptions, given)
    check_kinds(options.kinds)
    return run(_subject(given), options, given.output)


def _soak(given: argparse.Namespace) -> int:
    from integration.bench.e2e.cases import check_kinds
    from integration.bench.machine import store
    from integration.bench.soak import SoakOptions, soak
    from mtp_plugin.tools.terminal.console import messages, output, progress

    options = _options(SoakOptions, given)
    check_kinds(options.kinds, only_with_output=True)
    with progress(messages()) as show_progress:
        report = soak(_subject(given), options, show_progress)
    store(given.output, report)
    out = output()
    for check in report["results"]:
        out.write_line(f"{check['name']}: {'yes' if check['holds'] else 'NO'} ({check['found']})")
    out.write_line(str(report["counts"]))
    return int(not report["identical"])
