"""Write the generated tables of the README and of ``docs/``.

``python -m integration.reference_pages`` rewrites the blocks between ``<!-- reference: NAME -->``
and ``<!-- end -->`` from the config models, the options of the vLLM and SGLang plugins, the
recorded signatures of vLLM, ``pyproject.toml`` and the family table; a test compares the pages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from integration.vllm.signatures import stored
from mtp_plugin.checkpoint import FAMILIES as KNOWN
from mtp_plugin.checkpoint import SEPARATE_DRAFTERS
from mtp_plugin.config import (
    CudaGraphConfig,
    KVCacheConfig,
    LLMConfig,
    MTPDecodingConfig,
    MTPPluginOptions,
)
from mtp_plugin.hosts.embedded.models import FAMILIES
from mtp_plugin.hosts.sglang.options import SglangOptions
from mtp_plugin.hosts.vllm.options import VllmOptions
from mtp_plugin.hosts.vllm.versions import TESTED, differences
from mtp_plugin.requests.options import OPTIONS
from mtp_plugin.speculative.rows.request_options import PREFIX, RequestOptions

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "config.md", ROOT / "docs" / "compatibility.md")
_BLOCK = re.compile(r"(<!-- reference: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

# --- model families ---

_TRAINED = "tested, trained weights, CPU and H100"
_TESTED = "tested, random weights, CPU"
_RAN = "ran once, random weights, CPU"
_ON_GPU = "ran once, random weights, H200"
VLLM = {
    "glm4_moe": _TRAINED,
    "deepseek_v3": _TESTED,
    "qwen3_5": _TESTED,
    "ernie4_5_moe": _RAN,
    "gemma4_assistant": _ON_GPU,
    "exaone_moe": _RAN,
    "glm4_moe_lite": _RAN,
    "mimo": _RAN,
    "mimo_v2_flash": _RAN,
    "qwen3_5_moe": _RAN,
    "qwen3_next": _RAN,
}
"""How a family ran in vLLM with the plugin: ``tests/vllm`` repeats what is tested; what ran was
compared once, with and without drafts, in vLLM 0.32 on a CPU, 0.33 on a GPU."""
_ORDER = (_TRAINED, _TESTED, _RAN, _ON_GPU)
MODELS = {
    "bailing_hybrid": "Ling and Ring 2.5",
    "deepseek_v3": "DeepSeek-V3, R1, V3.1",
    "deepseek_v32": "DeepSeek-V3.2",
    "deepseek_v4": "DeepSeek-V4",
    "dots3_note": "dots.3",
    "ernie4_5_moe": "ERNIE-4.5",
    "exaone4_5": "EXAONE-4.5",
    "exaone_moe": "K-EXAONE",
    "gemma4_assistant": "Gemma-4 assistants",
    "gemma4_unified_assistant": "Gemma-4 unified assistants",
    "glm4_moe": "GLM-4.5, 4.6, 4.7",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "glm5_next": "GLM-5 Next",
    "glm_moe_dsa": "GLM-5",
    "glm_ocr": "GLM-OCR",
    "hy_v3": "Hy3",
    "hy_v4": "Hy4",
    "inkling_mm_model": "Inkling",
    "intern_s2_preview": "Intern-S2 Preview",
    "interns2_mobius": "Intern-S2 Mobius",
    "kimi_k3": "Kimi K3",
    "longcat_flash": "LongCat-Flash",
    "mimo": "MiMo-7B",
    "mimo_v2_flash": "MiMo-V2-Flash",
    "minimax_m3_vl": "MiniMax-M3",
    "nemotron_h": "Nemotron-3",
    "nemotron_h_puzzle": "Nemotron-3 Puzzle",
    "pangu_ultra_moe": "openPangu Ultra MoE",
    "qwen3_5": "Qwen3.5 dense",
    "qwen3_5_moe": "Qwen3.5 MoE",
    "qwen3_next": "Qwen3-Next",
    "qwen4_exp": "Qwen4",
    "step3p5": "Step-3.5",
    "step3p7": "Step-3.7",
    "step5": "Step-5",
}
"""Public models of each family."""
_SAME_MODELS = {"inkling_model", "mimo_v2", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"}
_SAME_MODELS |= {"step5_vl", "muse_glimmer_assistant"}
"""Families of parts of these models, and a drafter that has no MTP layers."""
EMBEDDED = {
    "deepseek_v3": "yes (MLA: exact, slow on a GPU)",
    "glm4_moe": "yes",
    "mimo": "yes",
    "qwen3_next": "only without recurrent layers, which the public ones have",
}
"""How the embedded executor runs the families of its table."""


def families() -> str:
    """Model families by what runs them; those with equal answers share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name in (*FAMILIES, *sorted(set(VLLM) - set(FAMILIES))):
        answer = EMBEDDED[name] if name in FAMILIES else "no", VLLM[name]
        rows.setdefault(answer, []).append(f"{MODELS[name]} (`{name}`)")
    ordered = sorted(rows, key=lambda answer: (answer[0] == "no", _ORDER.index(answer[1])))
    head = ["model family (`model_type`)", "embedded executor", "vLLM with the plugin"]
    known = {*KNOWN, *SEPARATE_DRAFTERS} - _SAME_MODELS - set(VLLM)
    others = ", ".join(f"{MODELS[name]} (`{name}`)" for name in sorted(known))
    return (
        table(head, [[", ".join(rows[answer]), *answer] for answer in ordered])
        + f"\nThe plugin should serve these in vLLM too; none was tried: {others}. What tools "
        "do to their files: [Checkpoints](docs/checkpoints.md).\n"
    )


# --- options ---

_INT64 = 2**63 - 1


def keys(model: type[BaseModel]) -> str:
    """Every key of a config model: values, default and meaning."""
    rows = []
    for name, field in model.model_fields.items():
        # of the field alone: the model's schema also has values of TensorRT-LLM that are set aside
        schema = TypeAdapter(Annotated[field.annotation, field]).json_schema()
        rows.append([f"`{name}`", _values(schema), _default(field), field.description or ""])
    return table(["key", "values", "default", "meaning"], rows)


def _values(schema: dict[str, Any]) -> str:
    """Return what a JSON schema accepts, in words."""
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return " or ".join(dict.fromkeys(map(_values, choices)))
    if "const" in schema or "enum" in schema:
        given = schema.get("enum", [schema.get("const")])
        return ", ".join(f"`{json.dumps(value)}`".replace('"', "") for value in given)
    kind = schema.get("type")
    if kind == "array":
        return f"list (each: {_values(schema['items'])})"
    if kind == "boolean":
        return "`true`, `false`"
    if kind in ("integer", "number"):
        return kind + _range(schema)
    return {"string": "text", "null": "`null`"}.get(str(kind), "mapping")


def _range(schema: dict[str, Any]) -> str:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    if low is None:
        return ""
    sign, high = ">" if "exclusiveMinimum" in schema else ">=", schema.get("maximum", _INT64)
    shown = {2**32 - 1: "2^32 - 1", 2**64 - 1: "2^64 - 1"}.get(high, high)
    return f" {sign} {low:g}" + ("" if high == _INT64 else f", <= {shown}")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "below" if isinstance(value, BaseModel) else f"`{json.dumps(value)}`".replace('"', "")


def vllm_requests() -> str:
    """The options of a request in vLLM."""
    rows = []
    for field in fields(RequestOptions):
        option = OPTIONS[field.name]
        rows.append([f"`{PREFIX}{field.name}`", option.values.words, option.about])
    return table(["key", "values", "meaning"], rows)


# --- versions ---


def packages() -> str:
    """Python and the packages of ``pyproject.toml``."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(), re.M))
    pythons = re.findall(r"Python :: (3\.\d+)", text)
    rows = [
        ["Python", f"{pythons[0]} to {pythons[-1]}", f"{pythons[0]} and {pythons[-1]} per push"]
    ]
    for name in ("torch", "triton", "transformers", "pydantic"):
        bounds = re.findall(rf'"{name}([<>=][^";]*)', text)
        rows.append([name, ", ".join(f"`{bound}`" for bound in bounds), pins[name]])
    return table(["package", "declared", "tests run with"], rows)


def vllm_versions() -> str:
    """What the plugin finds in each recorded version of vLLM."""
    rows = []
    for version, reader in stored().items():
        problems = differences(reader)
        minor = ".".join(version.split(".")[:2])
        fits = f"refused: {len(problems)} differences" if problems else "fits"
        rows.append([version, fits, TESTED.get(minor, "no")])
    return table(["vLLM", "signatures", "tested"], rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    lines.insert(1, "|" + "---|" * len(head))
    return "".join(f"{line}\n".replace("|  |", "| |") for line in lines)


BLOCKS: dict[str, Callable[[], str]] = {
    "families": families,
    "file": lambda: keys(LLMConfig),
    "kv_cache_config": lambda: keys(KVCacheConfig),
    "cuda_graph_config": lambda: keys(CudaGraphConfig),
    "speculative_config": lambda: keys(MTPDecodingConfig),
    "mtp": lambda: keys(MTPPluginOptions),
    "vllm-engine": lambda: keys(VllmOptions),
    "sglang-engine": lambda: keys(SglangOptions),
    "vllm-requests": vllm_requests,
    "packages": packages,
    "vllm-versions": vllm_versions,
}


def rendered(text: str) -> str:
    """Return a page with its blocks written anew."""
    return _BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}{found[3]}", text)


def named_blocks() -> Iterator[str]:
    """Yield the names of all blocks of the pages."""
    for page in PAGES:
        yield from (found[2] for found in _BLOCK.finditer(page.read_text(encoding="utf-8")))


def main() -> None:
    """Rewrite the pages."""
    for page in PAGES:
        page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
