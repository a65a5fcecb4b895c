"""Generate with the package's own executor: ``python -m tests.vllm.run_embedded JOB RESULT``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch


def main() -> None:
    """Run the job in the file of the first argument."""
    torch.set_num_threads(1)
    from mtp_plugin import LLM, SamplingParams

    job = json.loads(Path(sys.argv[1]).read_text())
    result = {}
    with LLM(**job["engine"]) as llm:
        for name, requests in job["phases"].items():
            outputs = llm.generate(
                [request["prompt"] for request in requests],
                [SamplingParams(**request["params"]) for request in requests],
            )
            result[name] = {"outputs": [{"tokens": list(o.token_ids)} for o in outputs]}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
