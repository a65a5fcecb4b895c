"""``python -m integration.bench ops``, ``step``, ``e2e`` and ``soak``."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from mtp_plugin.tools.command_group import CommandGroup

app = typer.Typer(
    name="bench",
    help="Time kernels and whole steps; no figure without a result like the reference's.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    cls=CommandGroup,
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
        "--output",
        metavar="FILE",
        help=f"JSON; the plot goes beside it. Default: in {RESULTS}; of a run without a GPU, or a "
        "quick one, nowhere.",
    ),
]
Cpu = Annotated[
    bool, typer.Option("--cpu", help="Compare results on tiny shapes without a GPU; no benchmark.")
]


def main() -> None:
    """Run on its own; named errors become one line each and exit code 2."""
    from mtp_plugin.tools.terminal.console import run_to_the_end

    run_to_the_end(app)


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


@app.command()
def e2e(
    model: Annotated[
        Path | None,
        typer.Option("--model", "-m", metavar="DIR", help="Checkpoint; acceptance is real."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape", metavar="NAME", help="Random weights of a named size, made on the device."
        ),
    ] = None,
    batch: Batches = None,
    isl: Annotated[
        int | None, typer.Option("--isl", metavar="N", help="Tokens of each prompt.")
    ] = None,
    osl: Annotated[
        int | None, typer.Option("--osl", metavar="N", help="Tokens that each request emits.")
    ] = None,
    k: Annotated[
        str | None, typer.Option("--k", metavar="N,N", help="Drafts per step. Default: 1,3.")
    ] = None,
    worker: Annotated[
        str | None,
        typer.Option("--worker", metavar="NAME,NAME", help="eagle, vanilla. Default: both."),
    ] = None,
    acceptance: Annotated[
        str | None,
        typer.Option(
            "--acceptance",
            metavar="P,P",
            help="Synthetic acceptance: a rate per draft, or the shares of steps that accept "
            "drafts 1..i. Default: real for a checkpoint, 0.8 for a shape.",
        ),
    ] = None,
    ask: Annotated[
        str | None,
        typer.Option(
            "--ask",
            metavar="NAME,NAME",
            help="Kinds of requests that take turns in one executor: greedy, sampled, "
            "sampled-logprob, sampled-top5, sampled-penalty, one-sampled; of a checkpoint also "
            "coupled, rejection, block or greedy-drafts with -t0.6 or -t1.0. Default: greedy.",
        ),
    ] = None,
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            "--draft-vocab", metavar="N", min=1, help="Ids that may be drafted. Default: all."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="NAME", help="float32, bfloat16 or float16.")
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="auto, cuda or cpu (no benchmark).")
    ] = "auto",
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of weights and prompts.")] = 0,
    graphs: Annotated[
        bool, typer.Option("--graphs/--no-graphs", help="CUDA graphs on a CUDA device.")
    ] = True,
    fused: Annotated[
        bool | None,
        typer.Option("--fused/--no-fused", help="Fused layers. Default: on a CUDA device."),
    ] = None,
    text: Annotated[
        bool, typer.Option("--text/--ids", help="Make text of a checkpoint's tokens as well.")
    ] = False,
    phases: Annotated[
        bool, typer.Option("--phases/--no-phases", help="Split a step's time by phase.")
    ] = True,
    generate: Annotated[
        bool,
        typer.Option(
            "--transformers/--no-transformers",
            help="Also run a checkpoint through transformers' generate, with and without use_mtp.",
        ),
    ] = True,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE", help="Chrome traces of a few steps, one per case with MTP."
        ),
    ] = None,
    tie_tolerance: Annotated[
        float | None,
        typer.Option(
            "--tie-tolerance",
            metavar="ULPS",
            help="In half precision; see `mtp-plugin parity`. Default: 4; with random weights 16.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small batches, few tokens.")] = False,
    only: Filter = None,
    output: Output = None,
) -> None:
    """Decode whole batches with MTP and without, and split a step's time by phase.

    Steps that only generate are timed apart from prompts; tokens per second are told for both. No
    figure without a match: with real acceptance the tokens are those of the run without MTP, and
    that run's are those of target-only decoding.

    Exit code 1: a case did not match or failed. 2: a named error.
    """
    from integration.bench.e2e.cases import E2EOptions
    from integration.bench.e2e.request_kinds import GREEDY
    from integration.bench.e2e.run import run

    options = E2EOptions(
        batches=_batches(batch),
        ks=_numbers(k, "--k"),
        workers=tuple(worker.split(",")) if worker else None,
        isl=isl,
        osl=osl,
        seed=seed,
        acceptance=_shares(acceptance),
        draft_vocab=draft_vocab,
        graphs=graphs,
        fused=fused,
        text=text,
        phases=phases,
        transformers=generate,
        quick=quick,
        only=only,
        asks=tuple(ask.split(",")) if ask else (GREEDY,),
    )
    code = run(
        options,
        checkpoint=model,
        shape=shape,
        device=device,
        dtype=dtype,
        folder=RESULTS,
        path=output,
        trace=trace,
        tie_ulps=tie_tolerance,
    )
    raise typer.Exit(code)


@app.command()
def soak(
    model: Annotated[Path, typer.Option("--model", "-m", metavar="DIR", help="Checkpoint.")],
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", help="How long requests arrive.")
    ] = 60.0,
    steps: Annotated[
        int | None,
        typer.Option("--steps", metavar="N", help="So many steps instead, the same everywhere."),
    ] = None,
    worker: Annotated[
        str, typer.Option("--worker", metavar="NAME", help="eagle or vanilla.")
    ] = "eagle",
    k: Annotated[int, typer.Option("--k", metavar="N", help="Drafts per step.")] = 3,
    batch_size: Annotated[
        int, typer.Option("--batch-size", metavar="N", help="Requests per step.")
    ] = 8,
    num_prompts: Annotated[
        int, typer.Option("--num-prompts", metavar="N", help="Different prompts.")
    ] = 24,
    longest_prompt: Annotated[
        int, typer.Option("--longest-prompt", metavar="N", help="Tokens of a prompt at most.")
    ] = 96,
    longest_output: Annotated[
        int, typer.Option("--longest-output", metavar="N", help="Tokens of an output at most.")
    ] = 96,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="NAME", help="float32, bfloat16 or float16.")
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="auto, cuda or cpu.")
    ] = "auto",
    graphs: Annotated[
        bool, typer.Option("--graphs/--no-graphs", help="CUDA graphs on a CUDA device.")
    ] = True,
    fused: Annotated[
        bool | None,
        typer.Option("--fused/--no-fused", help="Fused layers. Default: on a CUDA device."),
    ] = None,
    tie_tolerance: Annotated[
        float | None,
        typer.Option(
            "--tie-tolerance", metavar="ULPS", help="In half precision; see `mtp-plugin parity`."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of the traffic.")] = 0,
    output: Output = None,
) -> None:
    """Random arrivals, lengths, chunks, aborts and memory pressure for a while; then the checks.

    Nothing may leak, acceptance may not drift, and every output must be target-only decoding's.

    Exit code 1: a check does not hold. 2: a named error.
    """
    from integration.bench.soak.run import SoakOptions, run

    options = SoakOptions(
        seconds=seconds,
        steps=steps,
        seed=seed,
        worker=worker,
        k=k,
        batch_size=batch_size,
        num_prompts=num_prompts,
        longest_prompt=longest_prompt,
        longest_output=longest_output,
        graphs=graphs,
        fused=fused,
    )
    code = run(
        options,
        checkpoint=model,
        device=device,
        dtype=dtype,
        folder=RESULTS,
        path=output,
        tie_ulps=tie_tolerance,
    )
    raise typer.Exit(code)


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
    from integration.bench.run import run
    from integration.bench.suites import Options

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
    raise typer.Exit(run(kind, options, folder=RESULTS, path=output, cpu=cpu))


def _batches(text: str | None) -> tuple[int, ...] | None:
    return _numbers(text, "--batch")


def _numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"expected whole numbers with commas between, got {text!r}", param_hint=option
        ) from None


def _shares(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"expected numbers with commas between, got {text!r}", param_hint="--acceptance"
        ) from None


def _interpret_kernels() -> None:
    """Switch Triton's interpreter on; triton looks when it is imported."""
    if "triton" not in sys.modules and importlib.util.find_spec("triton") is not None:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    # numpy's view of infinities, which the kernels handle on purpose
    warnings.filterwarnings(
        "ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter"
    )
