"""A sampling option that is added as CONTRIBUTING.md says is applied by torch and kernels alike."""

from __future__ import annotations

import shutil
from pathlib import Path
from textwrap import indent

import pytest

from tests.fresh import run_code
from tests.test_contributing import (
    OPTION,
    OPTION_IN_KERNELS,
    OPTION_IN_REFERENCE,
    OPTION_IN_TORCH,
    ROOT,
)

LINES = {
    "requests/options/params.py": [("    prompt_ignore_length: Int = row(\n", OPTION)],
    "ops/logit_rows/processing.py": [
        ('\n    row = slots.read("bias_row", requests)[owners]\n', OPTION_IN_TORCH)
    ],
    "ops/logit_rows/processing_triton.py": [
        ("    return x\n\n\n@triton.jit\ndef process_values(", OPTION_IN_KERNELS),
        ("BIAS_ROW = ", 'POSITIVE_BIAS = tl.constexpr(request_column("positive_bias"))'),
    ],
    "infer/sampling_rule.py": [("        values = self._biased(values)\n", OPTION_IN_REFERENCE)],
}
"""File -> the line before which the lines of the recipe are added, and these."""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, in which the recipe was followed."""
    folder = tmp_path_factory.mktemp("recipe")
    for name in ("tests", "integration"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(
        ROOT / "mtp_plugin", folder / "mtp_plugin", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name, additions in LINES.items():
        path = folder / "mtp_plugin" / name
        text = path.read_text(encoding="utf-8")
        for before, added in additions:
            assert text.count(before) == 1, before
            code = before.lstrip("\n")
            margin = code[: len(code) - len(code.lstrip())]
            text = text.replace(before, indent(added.rstrip() + "\n", margin) + before)
        path.write_text(text, encoding="utf-8")
    return folder


def run(package: Path, module: str, *arguments: str) -> None:
    """Run a module as a program, with the package of the folder."""
    ended = run_code(
        f"import runpy, sys; sys.path.insert(0, {str(package)!r})\n"
        f"sys.argv[1:] = {list(arguments)!r}; import mtp_plugin\n"
        f"assert mtp_plugin.__file__.startswith({str(package)!r})\n"
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)",
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]


def test_torch_and_kernels_choose_the_tokens_of_the_recipe(package: Path) -> None:
    run(package, "tests.ops.logits_processing.recipe_program")


def test_executor_agrees_with_the_reference(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(package)
    config = package / "config.yaml"
    config.write_text(
        "model: integration/tiny_model/checkpoint\ndtype: float32\nspeculative_config: "
        "{decoding_type: MTP, max_draft_len: 2, mtp: {kernels: triton}}\n"
    )
    options = ["--temperature", "1", "--option", "positive_bias=2", "--max-new-tokens", "4"]
    run(package, "mtp_plugin", "generate", "--config", str(config), "--num-prompts", "1", *options)
