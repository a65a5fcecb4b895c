"""Write the generated tables of the README and of ``docs/``.

``python -m integration.reference_pages`` rewrites the blocks between ``<!-- reference: NAME -->``
and ``<!-- end -->`` from the family table; a test compares the pages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from mtp_plugin.hosts.embedded.models.families import FAMILIES

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md",)
_BLOCK = re.compile(r"(<!-- reference: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

_TRAINED = "tested, trained weights, CPU and H100"
_TESTED = "tested, random weights, CPU"
_RAN = "ran once, random weights, CPU"
_NOT_TRIED = "not tried"
VLLM = {
    "glm4_moe": _TRAINED,
    "deepseek_v3": _TESTED,
    "qwen3_5": _TESTED,
    "ernie4_5_moe": _RAN,
    "exaone_moe": _RAN,
    "glm4_moe_lite": _RAN,
    "mimo": _RAN,
    "mimo_v2_flash": _RAN,
    "qwen3_5_moe": _RAN,
    "qwen3_next": _RAN,
}
"""How a family ran in vLLM with the plugin: ``tests/vllm`` repeats what is tested; what ran was
compared once in vLLM 0.32, with K = 2 and K = 0."""
_ORDER = (_TRAINED, _TESTED, _RAN, _NOT_TRIED)
MODELS = {
    "bailing_hybrid": "Ling and Ring 2.5",
    "deepseek_v3": "DeepSeek-V3, R1, V3.1",
    "deepseek_v32": "DeepSeek-V3.2",
    "deepseek_v4": "DeepSeek-V4",
    "ernie4_5_moe": "ERNIE-4.5",
    "exaone_moe": "K-EXAONE",
    "gemma4_assistant": "Gemma-4 assistants",
    "glm4_moe": "GLM-4.5, 4.6, 4.7",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "glm_moe_dsa": "GLM-5",
    "hy_v3": "Hy3",
    "inkling": "Inkling",
    "longcat_flash": "LongCat-Flash",
    "mimo": "MiMo-7B",
    "mimo_v2_flash": "MiMo-V2-Flash",
    "minimax_m3_vl": "MiniMax-M3",
    "nemotron_h": "Nemotron-3",
    "qwen3_5": "Qwen3.5 dense",
    "qwen3_5_moe": "Qwen3.5 MoE",
    "qwen3_next": "Qwen3-Next",
    "step3p5": "Step-3.5",
    "step3p7": "Step-3.7",
}
"""Public models of each family."""
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
    for name in (*FAMILIES, *sorted(set(MODELS) - set(FAMILIES))):
        answer = EMBEDDED[name] if name in FAMILIES else "no", VLLM.get(name, _NOT_TRIED)
        rows.setdefault(answer, []).append(f"{MODELS[name]} (`{name}`)")
    ordered = sorted(rows, key=lambda answer: (answer[0] == "no", _ORDER.index(answer[1])))
    head = ["model family (`model_type`)", "embedded executor", "vLLM with the plugin"]
    return table(head, [[", ".join(rows[answer]), *answer] for answer in ordered])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    lines.insert(1, "|" + "---|" * len(head))
    return "".join(f"{line}\n".replace("|  |", "| |") for line in lines)


BLOCKS: dict[str, Callable[[], str]] = {"families": families}


def rendered(text: str) -> str:
    """Return a page with its blocks written anew."""
    return _BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}{found[3]}", text)


def main() -> None:
    """Rewrite the pages."""
    for page in PAGES:
        page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
