"""``python -m integration.bench ops``, ``step``, ``e2e``, ``serve`` and ``soak``."""

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
    help="Benchmarks; results are reported only after they match the reference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    cls=CommandGroup,
)

RESULTS = Path("integration/results")

Batches = Annotated[
    str | None, typer.Option("--batch", metavar="N,N", help="Batch sizes, separated by commas.")
]
Hidden = Annotated[int | None, typer.Option("--hidden", metavar="H", help="Hidden size.")]
Vocab = Annotated[int | None, typer.Option("--vocab", metavar="V", help="Vocabulary size.")]
DraftLen = Annotated[int | None, typer.Option("--k", metavar="K", help="Draft length.")]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="NAME", help="Dtype of logits: float32 or bfloat16."),
]
ModelDtype = Annotated[
    str | None, typer.Option("--dtype", metavar="NAME", help="float32, bfloat16 or float16.")
]
Device = Annotated[
    str, typer.Option("--device", metavar="NAME", help="auto, cuda or cpu (not a benchmark).")
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of weights and prompts.")]
Graphs = Annotated[bool, typer.Option("--graphs/--no-graphs", help="CUDA graphs on a CUDA device.")]
Fused = Annotated[
    bool | None,
    typer.Option("--fused/--no-fused", help="Fused layers. Default: on a CUDA device."),
]
TieTolerance = Annotated[
    float | None,
    typer.Option(
        "--tie-tolerance", metavar="ULPS", help="In half precision; see `mtp-plugin parity`."
    ),
]
Quick = Annotated[
    bool,
    typer.Option("--quick", help="Fewer batch sizes and samples, no variations of other sizes."),
]
Filter = Annotated[
    str | None,
    typer.Option("--filter", metavar="TEXT", help="Only cases whose name contains this."),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        metavar="FILE",
        help=f"JSON file; e2e writes a plot next to it. Default: in {RESULTS}; no file for a run "
        "without a GPU or with --quick.",
    ),
]
Cpu = Annotated[
    bool, typer.Option("--cpu", help="Only compare results, on tiny shapes without a GPU.")
]


def main() -> None:
    """Run the command line; a named error is printed as one line, with exit code 2."""
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
    """Time single ops: acceptance, draft inputs, drafts, bookkeeping and state copies.

    Exit code 1: a result differs from the reference. 2: a named error.
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
    """Time whole steps of the workers, with an empty model.

    Exit code 1: a result differs from the reference. 2: a named error.
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
            "--shape",
            metavar="NAME",
            help="Random weights of a named size, generated on the device.",
        ),
    ] = None,
    batch: Batches = None,
    isl: Annotated[
        int | None, typer.Option("--isl", metavar="N", help="Tokens of each prompt.")
    ] = None,
    osl: Annotated[
        int | None, typer.Option("--osl", metavar="N", help="Output tokens of each request.")
    ] = None,
    k: Annotated[
        str | None, typer.Option("--k", metavar="N,N", help="Draft lengths. Default: 1,3.")
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
            help="Synthetic acceptance: one rate per draft, or the acceptance rate at each "
            "position. Default: real for a checkpoint, 0.8 for a shape.",
        ),
    ] = None,
    request_kind: Annotated[
        str | None,
        typer.Option(
            "--ask",
            metavar="NAME,NAME",
            help="Kinds of requests, run alternately in one executor: greedy, sampled, "
            "sampled-logprob, sampled-top5, sampled-penalty, one-sampled; with a checkpoint also "
            "coupled, rejection, block or greedy-drafts with -t0.6 or -t1.0. Default: greedy.",
        ),
    ] = None,
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            "--draft-vocab",
            metavar="N",
            min=1,
            help="Number of token ids that may be drafted. Default: all.",
        ),
    ] = None,
    dtype: ModelDtype = None,
    device: Device = "auto",
    seed: Seed = 0,
    graphs: Graphs = True,
    fused: Fused = None,
    text: Annotated[
        bool, typer.Option("--text/--ids", help="Detokenize the output of a checkpoint.")
    ] = False,
    phases: Annotated[
        bool, typer.Option("--phases/--no-phases", help="Report the time of each phase of a step.")
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
            help="In half precision; see `mtp-plugin parity`. Default: 4; 16 for random weights.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small batches, few tokens.")] = False,
    only: Filter = None,
    output: Output = None,
) -> None:
    """Decode whole batches with and without MTP, and report the time of each phase of a step.

    Steps that only generate are timed separately from prompts; tokens per second are reported for
    both. Results are reported only after the output matches: with real acceptance, output with MTP
    is compared with that without, and output without MTP with target-only decoding.

    Exit code 1: a case differs or failed. 2: a named error.
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
        kinds=tuple(request_kind.split(",")) if request_kind else (GREEDY,),
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
def serve(
    model: Annotated[
        Path | None, typer.Option("--model", "-m", metavar="DIR", help="Checkpoint.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            metavar="NAME",
            help="Random weights of a named size whose drafts are often right.",
        ),
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", metavar="N", help="Number of requests at a time.")
    ] = 64,
    requests: Annotated[
        int, typer.Option("--requests", metavar="N", help="Number of requests.")
    ] = 512,
    isl: Annotated[int, typer.Option("--isl", metavar="N", help="Tokens of each prompt.")] = 128,
    osl: Annotated[
        int, typer.Option("--osl", metavar="N", help="Output tokens of each request.")
    ] = 256,
    k: Annotated[int, typer.Option("--k", metavar="K", help="Draft length.")] = 3,
    clients: Annotated[
        int, typer.Option("--clients", metavar="N", help="Number of client processes.")
    ] = 4,
    rounds: Annotated[
        int, typer.Option("--rounds", metavar="N", help="Number of runs of each kind.")
    ] = 3,
    residual_scale: Annotated[
        float | None,
        typer.Option(
            "--residual-scale",
            metavar="X",
            help="Scale of the layers' outputs with --shape: the smaller, the more drafts are "
            "accepted.",
        ),
    ] = None,
    text: Annotated[
        bool,
        typer.Option(
            "--text/--ids",
            help="Detokenize the output; with --shape, by a made-up tokenizer of its vocabulary.",
        ),
    ] = False,
    dtype: ModelDtype = None,
    device: Device = "auto",
    seed: Seed = 0,
    graphs: Graphs = True,
    fused: Fused = None,
    tie_tolerance: TieTolerance = None,
    output: Output = None,
) -> None:
    """Compare the throughput over HTTP, streamed and not, with that of `LLM.generate`.

    All three run the same greedy requests in turn, with real acceptance. The server runs in a
    thread, as in `mtp-plugin serve`; clients are processes of their own. Numbers are reported only
    if all outputs match.

    Exit code 1: an output differs. 2: a named error.
    """
    from integration.bench.serve.run import RESIDUAL_SCALE, ServeOptions, run

    options = ServeOptions(
        concurrency=concurrency,
        requests=requests,
        isl=isl,
        osl=osl,
        k=k,
        clients=clients,
        rounds=rounds,
        residual_scale=RESIDUAL_SCALE if residual_scale is None else residual_scale,
        text=text,
        graphs=graphs,
        fused=fused,
        seed=seed,
    )
    code = run(
        options,
        checkpoint=model,
        shape=shape,
        device=device,
        dtype=dtype,
        folder=RESULTS,
        path=output,
        tie_ulps=tie_tolerance,
    )
    raise typer.Exit(code)


@app.command()
def soak(
    model: Annotated[Path, typer.Option("--model", "-m", metavar="DIR", help="Checkpoint.")],
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", help="Seconds during which requests arrive.")
    ] = 60.0,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", metavar="N", help="Number of steps instead, for a reproducible run."
        ),
    ] = None,
    worker: Annotated[
        str, typer.Option("--worker", metavar="NAME", help="eagle or vanilla.")
    ] = "eagle",
    k: Annotated[int, typer.Option("--k", metavar="N", help="Draft length.")] = 3,
    batch_size: Annotated[
        int, typer.Option("--batch-size", metavar="N", help="Requests per step.")
    ] = 8,
    num_prompts: Annotated[
        int, typer.Option("--num-prompts", metavar="N", help="Number of different prompts.")
    ] = 24,
    longest_prompt: Annotated[
        int, typer.Option("--longest-prompt", metavar="N", help="Maximum tokens of a prompt.")
    ] = 96,
    longest_output: Annotated[
        int, typer.Option("--longest-output", metavar="N", help="Maximum tokens of an output.")
    ] = 96,
    request_kind: Annotated[
        str | None,
        typer.Option(
            "--ask",
            metavar="NAME,NAME",
            help="Kinds of requests, chosen at random: greedy, sampled, sampled-penalty, coupled "
            "or greedy-drafts with -t0.6 or -t1.0. Default: greedy.",
        ),
    ] = None,
    dtype: ModelDtype = None,
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="auto, cuda or cpu.")
    ] = "auto",
    graphs: Graphs = True,
    fused: Fused = None,
    tie_tolerance: TieTolerance = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the traffic.")] = 0,
    output: Output = None,
) -> None:
    """Run random traffic: arrivals, lengths, chunks, aborts and memory pressure; then check.

    No resource may leak, acceptance may not drift, and each output must be identical to target-only
    decoding.

    Exit code 1: a check failed. 2: a named error.
    """
    from integration.bench.e2e.request_kinds import GREEDY
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
        kinds=tuple(request_kind.split(",")) if request_kind else (GREEDY,),
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
    """Enable Triton's interpreter; triton reads the variable when it is imported."""
    if "triton" not in sys.modules and importlib.util.find_spec("triton") is not None:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    # numpy warns of infinities, which the kernels handle
    warnings.filterwarnings(
        "ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter"
    )
