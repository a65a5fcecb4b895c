"""Small random checkpoints, loaded once, and executors over them."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from integration.random_models import write_random_checkpoint
from mtp_plugin.hosts.embedded import LLM, LlmRequest, StepEvent
from mtp_plugin.hosts.embedded.models import fuse, load_model
from mtp_plugin.infer import decode
from tests.hosts.embedded.oracles import Oracle

VOCAB = 128
LOOPS = [pytest.param(True, id="no_overlap"), pytest.param(False, id="overlap")]
WORKERS = [pytest.param(False, id="eagle"), pytest.param(True, id="vanilla")]
TRAINED = str(Path(__file__).parents[3] / "integration" / "tiny_model" / "checkpoint")
CHECKPOINTS = {
    "echo": {"family": "glm4_moe", "seed": 3, "residual_scale": 0.4},
    "looping": {"family": "glm4_moe", "seed": 6, "residual_scale": 0.0},
    "mla": {"family": "deepseek_v3", "seed": 4, "residual_scale": 0.4},
}


class Harness:
    """A checkpoint with a CPU model for oracles, a model for executors, and a factory of `LLM`s.

    Args:
        host: options of every executor, such as the device.
    """

    def __init__(self, path, num_mtp_layers: int, host: dict) -> None:
        self.path = str(path)
        self.host = host
        self.oracle_model = load_model(self.path, num_mtp_layers=num_mtp_layers)
        self.target = Oracle(self.oracle_model, 1, vanilla=False)
        on_gpu = host["device"] == "cuda"
        self.model = load_model(
            self.path, num_mtp_layers=num_mtp_layers, device="cuda" if on_gpu else "cpu"
        )
        if on_gpu:
            self.model = fuse(self.model)

    def llm(self, *, k: int = 3, vanilla: bool = False, mtp=None, tokenizer=None, **options) -> LLM:
        """An executor; ``k=0`` decodes without speculation."""
        llm_options = {
            name: options.pop(name)
            for name in ("chunk_policy", "kv_fill", "stop_callback")
            if name in options
        }
        speculative = None
        if k > 0:
            speculative = {
                "decoding_type": "MTP",
                "max_draft_len": k,
                "use_mtp_vanilla": vanilla,
                "mtp": {"check_metadata": True, **(mtp or {})},
                **options.pop("speculative", {}),
            }
        cache = {"tokens_per_block": 4, "max_tokens": 1024}
        cache.update(options.pop("kv_cache_config", {}))
        host = dict(self.host)
        if "cuda_graph_config" in host and "max_batch_size" in options:
            graphs, largest = host["cuda_graph_config"], options["max_batch_size"]
            sizes = sorted({min(size, largest) for size in graphs["batch_sizes"]})
            host["cuda_graph_config"] = {**graphs, "batch_sizes": sizes}
        config = {
            "model": self.path,
            "max_batch_size": 8,
            "max_num_tokens": 256,
            "max_seq_len": 128,
            "kv_cache_config": cache,
            "speculative_config": speculative,
            **host,
            **options,
        }
        return LLM(config, model=self.model, tokenizer=tokenizer, **llm_options)


@pytest.fixture(scope="session")
def host() -> dict:
    """Device options of executors; `on_gpu` overrides them on a machine with a GPU."""
    return {"device": "cpu" if torch.cuda.is_available() else "auto"}


@pytest.fixture(scope="session")
def harnesses(tmp_path_factory) -> Callable[[str, dict], Harness]:
    """Return a factory that makes each harness once, by checkpoint and host options.

    The fixtures that use it have function scope: with session scope, pytest would keep the first
    host's harness.
    """
    folder = tmp_path_factory.mktemp("harnesses")
    made: dict[str, Harness] = {}

    def make(name: str, host: dict) -> Harness:
        # an absolute path stays
        path, key = folder / name, f"{name} {host}"
        if not path.exists():
            options = {"num_mtp_layers": 3, "echo_draft": True, "vocab_size": VOCAB}
            write_random_checkpoint(path, **options, **CHECKPOINTS[name])
        if key not in made:
            made[key] = Harness(path, 3, host)
        return made[key]

    return make


@pytest.fixture
def harness(harnesses, host) -> Harness:
    """Three MTP layers whose drafts are often, not always, right."""
    return harnesses("echo", host)


@pytest.fixture
def trained_harness(harnesses, host) -> Callable[[], Harness]:
    """The tiny trained model, with realistic drafts; loaded on demand."""
    return lambda: harnesses(TRAINED, host)


@pytest.fixture
def looping_harness(harnesses, host) -> Harness:
    """The next token depends on the last one alone, so that every long text loops."""
    return harnesses("looping", host)


@pytest.fixture
def mla_harness(harnesses, host) -> Harness:
    """Latent attention, three MTP layers."""
    return harnesses("mla", host)


@pytest.fixture
def prompts() -> list[list[int]]:
    """Mixed lengths, 1 to 33 tokens."""
    rng = random.Random(5)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in (1, 2, 3, 5, 9, 17, 33, 4)]


def pads_batches(harness: Harness) -> None:
    """Skip if the CPU is selected explicitly: batches are not padded there."""
    if harness.host["device"] == "cpu":
        pytest.skip("padded batches run on this machine's GPU, in on_gpu")


def wrap_worker(llm: LLM, wrap) -> None:
    """Put ``wrap(worker)`` in the worker's place."""
    engine = llm.executor.engine
    engine.captured = None  # graphs hold the worker that they were captured with
    engine.pieces = dataclasses.replace(engine.pieces, worker=wrap(engine.pieces.worker))


def enqueue(llm: LLM, prompts, params) -> list[LlmRequest]:
    """Requests that the executor knows, none of them run yet."""
    requests = llm.make_requests(prompts, [params] * len(prompts))
    for request in requests:
        llm.executor.enqueue(request)
    return requests


def run_steps(llm: LLM, most: int = 2000) -> list[StepEvent]:
    """Run all that is left in this thread; return its events."""
    events: list[StepEvent] = []
    while llm.executor.has_work:
        events += llm.executor.step()
        most -= 1
        assert most, "the executor never ends"
    return events


def generate(llm: LLM, prompts, params) -> list[list[int]]:
    """The tokens of each output; afterwards nothing is held."""
    outputs = llm.generate(prompts, params)
    assert_drained(llm)
    return [output.token_ids for output in outputs]


def decoded(harness: Harness, prompts, params, first_number: int = 0, **options) -> list[list[int]]:
    """The same from the plain decoder, one request at a time."""
    return [
        decode(harness.oracle_model.target, prompt, one, number=number, **options).token_ids
        for number, (prompt, one) in enumerate(zip(prompts, params, strict=True), first_number)
    ]


class WatchedWorker(torch.nn.Module):
    """Calls functions with the arguments of each step, before it, and its outputs, after it."""

    def __init__(self, worker: torch.nn.Module, before, after) -> None:
        super().__init__()
        self.worker, self.before, self.after = worker, before, after

    def forward(self, **arguments):
        self.before(arguments)
        outputs = self.worker(**arguments)
        self.after(arguments, outputs)
        return outputs


def watch_worker(llm: LLM, before=lambda _: None, after=lambda *_: None) -> None:
    """Call ``before(arguments)`` and ``after(arguments, outputs)`` in every step; both may change
    them, or raise an error."""
    wrap_worker(llm, lambda worker: WatchedWorker(worker, before, after))


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether a condition holds within some time; the engine thread acts after the caller."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.0005)
    return True


def assert_idle(llm: LLM) -> None:
    """No request is left, and no step in flight."""
    assert wait_until(lambda: not llm.executor.has_work)


def assert_drained(llm: LLM) -> None:
    """Every slot and block was given back."""
    slots = llm.pieces.manager.slot_manager

    def is_drained() -> bool:
        return (
            llm.blocks.num_free_blocks == llm.blocks.num_blocks
            and not llm.seq_slots.slots.slot_mapping
            and not slots.slot_mapping
            and len(set(slots.free_slots)) == slots.max_num_requests
        )

    assert wait_until(is_drained)


@pytest.fixture
def target(harness) -> Oracle:
    """The target of ``harness`` alone."""
    return harness.target
