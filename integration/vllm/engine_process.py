"""vLLM engines, each in a process of its own: vLLM keeps global state."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from mtp_plugin.hosts.vllm.options import drafter_config

ROOT = Path(__file__).parents[2]
CHECKPOINT = "integration/tiny_model/checkpoint"
SHIM = ROOT / "tests" / "vllm" / "shim"
"""Python path of engines on a CPU: a backend for Triton's interpreter, a stub of torchvision."""
START_SECONDS = 600.0
COMMON_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}
CPU_ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_CI_ENV": "1",
}
"""The code of vLLM's GPU runner on a CPU."""
_PLUGIN = {"mtp_plugin": "mtp_plugin.hosts.vllm:register"}


class EngineError(RuntimeError):
    """An engine failed, hung or ended; the message holds the end of its log."""


def has_gpu() -> bool:
    """Whether engines run on a GPU."""
    import torch

    return bool(torch.cuda.is_available())


def prepare(folder: Path, on_gpu: bool, plugins: Mapping[str, str] | None = None) -> None:
    """Set the environment variables of all engines; call it before the first one starts.

    Args:
        folder: of logs and compiled kernels. If the package is not installed but on the Python
            path, its entry point is written there.
        plugins: further plugins of vLLM, ``module:function`` by name, for all of its processes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT)] if on_gpu else [str(SHIM), str(ROOT)]
    is_installed = bool(entry_points(group="vllm.general_plugins", name="mtp_plugin"))
    for name, target in (({} if is_installed else _PLUGIN) | dict(plugins or {})).items():
        info = (folder / "entry_point" / f"{name}-0.dist-info").resolve()
        info.mkdir(parents=True, exist_ok=True)
        title = name.replace("_", "-")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {title}\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {target}\n")
        paths.append(str(info.parent))
    sys.path[:0] = paths  # a started process gets it, whatever PYTHONPATH says
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    os.environ.update(COMMON_ENVIRONMENT, PYTHONPATH=os.pathsep.join(paths))
    if on_gpu:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
        # CUPTI that starts again after a trace may fail with CUDA graphs
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
    else:
        os.environ.update(CPU_ENVIRONMENT)


def write_one_mtp_layer(folder: Path) -> str:
    """Write the tiny model with its first MTP layer alone, which vLLM reuses for every draft, and
    return the path. With several layers vLLM runs one module a draft, at most as many as there are.
    """
    from safetensors.torch import load_file, save_file

    given = ROOT / CHECKPOINT
    shutil.copytree(given, folder, dirs_exist_ok=True)
    config = json.loads((given / "config.json").read_text())
    first = config["num_hidden_layers"]
    dropped = [f"model.layers.{first + n}." for n in range(1, config["num_nextn_predict_layers"])]
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    tensors = load_file(str(given / "model.safetensors"))
    kept = {name: x for name, x in tensors.items() if not name.startswith(tuple(dropped))}
    save_file(kept, str(folder / "model.safetensors"))
    return str(folder)


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of all commands of this folder."""
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--folder", type=Path, help="keep logs and compiled kernels there")
    parser.add_argument(
        "--wait",
        type=Path,
        help="create FILE.ready when the engines are ready, then wait until FILE exists",
        metavar="FILE",
    )


def measured(
    measure: Callable[[argparse.Namespace, Path], dict[str, Any]], options: argparse.Namespace
) -> dict[str, Any] | None:
    """Return what ``measure`` finds, with logs in ``--folder`` or one that goes away; None: an
    engine failed, and the reason is printed. SIGTERM ends the engines too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as temporary:
        try:
            return measure(options, (options.folder or Path(temporary)).resolve())
        except EngineError as error:
            sys.stdout.write(f"{error}\nFAILED\n")
            return None


def wait_for(path: Path | None) -> None:
    """Report that the engines are ready, and wait until the file appears."""
    if path is not None:
        Path(f"{path}.ready").touch()
        while not path.exists():
            time.sleep(0.05)


def engine_settings(
    num_drafts: int,
    on_gpu: bool,
    plugin: dict[str, Any] | None,
    drafter: str = "mtp",
    **more: Any,
) -> dict[str, Any]:
    """Return keyword arguments of vLLM's ``LLM``.

    Args:
        num_drafts: K; 0: no speculative decoding.
        plugin: options of the plugin; None: off.
        drafter: as `drafter_config` takes it.
        more: replaces or adds arguments; ``speculative_config`` adds to the one of K.
    """
    settings: dict[str, Any] = {
        "model": CHECKPOINT,
        "dtype": "float32",
        "max_model_len": 512,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "seed": 0,
    }
    if on_gpu:
        # float32 without flash attention, and a small share of the memory: engines share the GPU
        settings |= {
            "attention_backend": "TRITON_ATTN",
            "gpu_memory_utilization": 0.05,
            "kv_cache_memory_bytes": 2**30,
        }
    else:
        settings["enforce_eager"] = True
    if plugin is not None:
        settings["additional_config"] = {"mtp_plugin": plugin}
    speculative = more.pop("speculative_config", {})
    if num_drafts:
        settings["speculative_config"] = {
            **drafter_config(drafter),
            "num_speculative_tokens": num_drafts,
            **speculative,
        }
    return settings | more


def cores_of_each(num_engines: int) -> list[list[int]]:
    """Return the CPU cores of each engine: an even part of those that this process may use, or none
    if there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // num_engines
    return [cores[n * each : (n + 1) * each] for n in range(num_engines)]


class EngineProcess:
    """One engine; functions ``(llm, **arguments)`` run in its process, one at a time.

    Args:
        name: of the log and the compile cache in the folder.
        settings: keyword arguments of ``LLM``.
        in_process: without vLLM's own process for the engine core, so that functions can read its
            state.
        before: called in the process before vLLM loads the model.
        cores: the only CPU cores that it uses; empty: all that this process may use.
    """

    def __init__(
        self,
        name: str,
        settings: dict[str, Any],
        folder: Path,
        *,
        in_process: bool = False,
        before: Callable[[], Any] | None = None,
        cores: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._has_plugin = "additional_config" in settings
        env = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
            "VLLM_CACHE_ROOT": str(folder / f"cache-{name}"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / f"cache-{name}" / "inductor"),
        }
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(other, settings, env, str(self.log), before, cores)
        )
        self._process.start()
        other.close()

    def wait_until_ready(self, timeout: float = START_SECONDS) -> dict[str, Any]:
        """Return what vLLM chose: runner, graphs, scheduling.

        Raises:
            EngineError: vLLM did not start, or without the plugin; see the message.
        """
        found: dict[str, Any] = self.result(timeout)
        if self._has_plugin and "mtp_plugin on: verification" not in self.log.read_text(
            errors="replace"
        ):
            raise EngineError(self._message("started without the plugin"))
        return found

    def start_call(self, function: Callable[..., Any], **arguments: Any) -> None:
        """Run a function in the process; `result` returns what it returns."""
        with contextlib.suppress(ConnectionError):  # the process has ended: `result` says so
            self._connection.send((function, arguments))

    def result(self, timeout: float) -> Any:
        """Return the result of the last call.

        Raises:
            EngineError: the function raised, the process ended, or the time is over.
        """
        try:
            if not self._connection.poll(timeout):
                raise EngineError(self._message(f"no answer after {timeout:.0f} s"))
            is_error, value = self._connection.recv()
        except (EOFError, ConnectionError):
            raise EngineError(self._message("ended")) from None
        if is_error:
            raise EngineError(self._message(value))
        return value

    def call(self, function: Callable[..., Any], timeout: float, **arguments: Any) -> Any:
        """Run a function in the process and return its result."""
        self.start_call(function, **arguments)
        return self.result(timeout)

    def close(self) -> None:
        """End the process, and those of vLLM that it started."""
        self._connection.close()
        self._process.join(10)
        with contextlib.suppress(ProcessLookupError):  # all of them have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()

    def _message(self, what: str) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        errors = [line[:300] for line in text.splitlines() if "Error" in line]
        first = "\n".join(dict.fromkeys(errors[:8]))  # a cause is far above the end
        return (
            f"engine {self.name}: {what}\nfirst errors of {self.log}:\n{first}\n"
            f"its end:\n{text[-3000:]}"
        )


def _serve(
    connection: Any,
    settings: dict[str, Any],
    env: dict[str, str],
    log: str,
    before: Callable[[], Any] | None,
    cores: Sequence[int],
) -> None:
    os.setpgid(0, 0)  # `close` ends the whole group
    if cores:
        os.sched_setaffinity(0, cores)
    os.environ.update(env)
    with open(log, "w") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    try:
        from vllm import LLM

        if before is not None:
            before()
        llm = LLM(**settings)
        connection.send((False, _described(llm)))
        while True:
            function, arguments = connection.recv()
            connection.send((False, function(llm, **arguments)))
    except (EOFError, ConnectionError):  # the parent closed the connection
        llm.llm_engine.engine_core.shutdown()
    except Exception as error:
        traceback.print_exc()
        connection.send((True, f"{type(error).__name__}: {error}"[:2000]))


def _described(llm: Any) -> dict[str, Any]:
    import vllm

    config = llm.llm_engine.vllm_config
    return {
        "vllm": str(vllm.__version__),
        "v2_runner": config.use_v2_model_runner,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "dtype": str(config.model_config.dtype),
        "drafter": getattr(config.speculative_config, "method", None),
    }
