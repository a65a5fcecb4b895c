"""The code of CONTRIBUTING.md runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

from mtp_plugin import LLM, SamplingParams
from mtp_plugin.plugin import unregister_drafter, unregister_verification
from mtp_plugin.requests.options import params
from mtp_plugin.speculative.verification import strict

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCKS = [dedent(x) for x in re.findall(r"^ *```python\n(.*?)^ *```", PAGE, re.DOTALL | re.M)]
OPTION, OPTION_IN_TORCH, OPTION_IN_KERNELS, OPTION_IN_REFERENCE = BLOCKS[:4]
CUSTOM_VERIFICATION, VERIFICATION, CUSTOM_DRAFTER = BLOCKS[4:]


def test_page_is_short() -> None:
    assert len(PAGE.splitlines()) <= 212


def test_sampling_option_is_a_row_of_the_table() -> None:
    names: dict[str, Any] = dict(vars(params))
    exec("from __future__ import annotations\nclass Options:\n" + indent(OPTION, "    "), names)
    (option,) = fields(dataclass(names["Options"]))
    row = option.metadata["option"]
    known = {each.name for each in fields(params.Option)} | {"about", "host", "values", "neutral"}
    assert set(row) <= known
    assert row["values"].allows(2.0)


def test_registered_verification_method_runs() -> None:
    checkpoint = str(ROOT / "integration" / "tiny_model" / "checkpoint")
    mtp = {"verification": ["coupled", "top2"]}
    speculative_config = {"decoding_type": "MTP", "max_draft_len": 2, "mtp": mtp}
    exec(CUSTOM_VERIFICATION, {"__name__": "example"})
    try:
        params = SamplingParams(max_tokens=16, ignore_eos=True, verification="top2")
        with LLM(checkpoint, speculative_config=speculative_config) as llm:
            (output,) = llm.generate(["class HTTPServer:\n"], params)
    finally:
        unregister_verification("top2")
    assert len(output.token_ids) == 16
    assert "top2" in str(output.label)


def test_verification_method_is_a_class() -> None:
    names: dict[str, Any] = dict(vars(strict))
    exec(VERIFICATION, names)
    assert names["SingleVerification"].verifications == ("single",)


def test_registered_drafter_is_lossless() -> None:
    checkpoint = str(ROOT / "integration" / "tiny_model" / "checkpoint")
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    exec(CUSTOM_DRAFTER, {"__name__": "example"})
    outputs = []
    try:
        for config in (None, {"decoding_type": "repeat_last", "max_draft_len": 3}):
            with LLM(checkpoint, speculative_config=config) as llm:
                outputs += llm.generate(["class HTTPServer:\n"], params)
    finally:
        unregister_drafter("repeat_last")
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[1].acceptance.num_drafted > 0


def test_paths_exist() -> None:
    paths = re.findall(r"`([\w./]+/(?:[\w.]+\.\w+)?)`", PAGE)
    assert len(paths) > 10
    assert [path for path in paths if "NAME" not in path and not (ROOT / path).exists()] == [
        "mtp_plugin/speculative/verification/single.py"
    ]
