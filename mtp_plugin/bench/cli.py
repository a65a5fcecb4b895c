"""``mtp-plugin bench ops`` and ``mtp-plugin bench step``."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from mtp_plugin.errors import MTPPluginError

app = typer.Typer(
    name="bench",
    help="Time kernels and whole steps; no figure without a result like the reference's.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RESULTS = Path("integration/results")

Batches = Annotated[
    str | None, typer.Option("--batch", metavar="N,N", help="Batch sizes, with commas between.")
]
Hidden = Annotated[int | None, typer.Option("--hidden", metavar="H", help="Hidden size.")]
Vocab = Annotated[int | None, typer.Option("--vocab", metavar="V", help="Vocabulary size.")]
DraftLen = Annotated[int | None, typer.Option("--k", metavar="K", help="Drafts per request.")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="NAME", help="Of logits: float32 or bfloat16.")
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Fewer batch sizes and samples, no other sizes.")
]
Filter = Annotated[
    str | None, typer.Option("--filter", metavar="TEXT", help="Only cases with this in the name.")
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", metavar="FILE", help=f"JSON; the plot goes beside it. Default: in {RESULTS}."
    ),
]
Cpu = Annotated[
    bool, typer.Option("--cpu", help="Compare results on tiny shapes without a GPU; no benchmark.")
]


def main() -> None:
    """Run on its own; named errors become one line each and exit code 2."""
    try:
        app()
    except MTPPluginError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


@app.command()
def ops(
    batch: Batches = None,
    hidden: Hidden = None,
    vocab: Vocab = None,
    k: DraftLen = None,
    dtype: Dtype = None,
    quick: Quick = False,
    only: Filter = None,
    output: Output = None,
    cpu: Cpu = False,
) -> None:
    """Acceptance, draft inputs, drafts, bookkeeping and state copies, one at a time.

    Exit code 1: a result differs from the reference's. 2: a named error.
    """
    _run("ops", batch, hidden, vocab, k, dtype, quick, only, output, cpu)


@app.command()
def step(
    batch: Batches = None,
    hidden: Hidden = None,
    vocab: Vocab = None,
    k: DraftLen = None,
    dtype: Dtype = None,
    quick: Quick = False,
    only: Filter = None,
    output: Output = None,
    cpu: Cpu = False,
) -> None:
    """Whole steps of the workers around a model that costs nothing.

    Exit code 1: a result differs from the reference's. 2: a named error.
    """
    _run("step", batch, hidden, vocab, k, dtype, quick, only, output, cpu)


def _run(
    kind: str,
    batch: str | None,
    hidden: int | None,
    vocab: int | None,
    k: int | None,
    dtype: str | None,
    quick: bool,
    only: str | None,
    output: Path | None,
    cpu: bool,
) -> None:
    if cpu:
        _interpret_kernels()
    # torch takes seconds to import
    from mtp_plugin.bench.run import run
    from mtp_plugin.bench.suites import Options

    options = Options(
        batches=_batches(batch),
        hidden=hidden,
        vocab=vocab,
        k=k,
        dtype=dtype,
        quick=quick,
        only=only,
        tiny=cpu,
    )
    raise typer.Exit(run(kind, options, output or RESULTS / f"{kind}.json", cpu=cpu))


def _batches(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"expected whole numbers with commas between, got {text!r}", param_hint="--batch"
        ) from None


def _interpret_kernels() -> None:
    """Switch Triton's interpreter on; triton looks when it is imported."""
    if "triton" not in sys.modules and importlib.util.find_spec("triton") is not None:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    # numpy's view of infinities, which the kernels handle on purpose
    warnings.filterwarnings(
        "ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter"
    )
