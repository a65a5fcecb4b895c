"""Start one vLLM engine per form of a checkpoint, and write what each did as JSON.

``python -m tests.vllm.run_checkpoints JOB RESULT``. Engines start in forks of one process, as most
of the time of a start is the import of vLLM.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

from integration.vllm.requests import counters
from tests.checkpoint.forms import CHECKPOINTS, TINY, write
from tests.vllm.run_engine import generate

ACCEPTED = "spec_decode_num_accepted_tokens"


def main() -> None:
    """Run the job in the file of the first argument."""
    job = json.loads(Path(sys.argv[1]).read_text())
    import vllm  # noqa: F401 - before the forks

    found = {}
    for number, name in enumerate(job["phases"]):
        folder = Path(f"{sys.argv[2]}.{number}")
        folder.mkdir()
        child = os.fork()
        if not child:
            _run(name, job, folder)
        os.waitpid(child, 0)
        answer = folder / "answer.json"
        found[name] = json.loads(answer.read_text()) if answer.exists() else {"error": "no answer"}
        shutil.rmtree(folder)
    Path(sys.argv[2]).write_text(json.dumps(found))


def _run(name: str, job: dict[str, Any], folder: Path) -> None:
    """Write the answer of a form, and end the process."""
    edit, form, _, _ = CHECKPOINTS[name]
    write(folder, edit, **form, with_weights=True)
    for file in TINY.glob("tokenizer*"):
        shutil.copy(file, folder / file.name)
    try:
        answer = _start({**job["engine"], "model": str(folder)}, job["phases"][name])
    except BaseException as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
    (folder / "answer.json").write_text(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)


def _start(engine: dict[str, Any], requests: list[dict[str, Any]]) -> dict[str, Any]:
    from vllm import LLM

    llm = LLM(**engine)
    tokens = [output["tokens"] for output in generate(llm, requests)]
    return {"tokens": tokens, "accepted": counters(llm)[ACCEPTED]}


if __name__ == "__main__":
    main()
