"""The plugin without the packages of the extra ``executor``, and what needs them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mtp_plugin import extras
from mtp_plugin.checkpoint.vllm_command import vllm_command
from mtp_plugin.errors import MissingExtraError, MTPPluginError
from tests.fresh import Ended, run_code

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
EXTRA = ("transformers", "tokenizers", "safetensors", "typer", "rich")
INSTALL = "pip install '.[executor]' in a clone of the repository"
VLLM_PAGE = Path(__file__).parents[1] / "mtp_plugin" / "hosts" / "vllm" / "README.md"

WHAT_NEEDS_MODELS = {
    "from mtp_plugin import LLM": "the embedded executor (mtp_plugin.LLM)",
    "import mtp_plugin.hosts.embedded.models": "the embedded executor (mtp_plugin.LLM)",
    "import mtp_plugin.hosts.embedded.scheduler": "the embedded executor (mtp_plugin.LLM)",
}


def without(packages: tuple[str, ...], code: str) -> Ended:
    """Run code without any of the packages."""
    return run_code(code, hidden=packages)


def process_without(packages: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that has none of the packages."""
    hidden = f"import sys; sys.modules.update(dict.fromkeys({packages!r}))\n"
    command = [sys.executable, "-c", hidden + code]
    return subprocess.run(command, capture_output=True, text=True)


def message(user: str, *packages: str) -> str:
    many = len(packages) > 1
    what, which = ("packages", "which are") if many else ("package", "which is")
    return f"{user} needs the {what} {', '.join(packages)}, {which} not installed: {INSTALL}"


def name_of(requirement: str) -> str:
    return re.split(r"[\s<>=!;\[]", requirement)[0]


def test_what_a_host_has_to_have() -> None:
    assert sorted(PROJECT["dependencies"]) == [
        "pydantic>=2",
        "pyyaml",
        "torch>=2.9",
        "triton; sys_platform == 'linux'",
        "typing_extensions>=4.12",
    ]


def test_what_the_extra_adds() -> None:
    optional = PROJECT["optional-dependencies"]
    bounds = ["torch<2.15", "triton<3.9; sys_platform == 'linux'"]
    names = [name_of(one) for one in optional["executor"] if one not in bounds]
    assert sorted(names) == sorted(EXTRA)
    assert sorted(extras.COMMAND_LINE_PACKAGES) == sorted(EXTRA)
    (least, below) = (".".join(map(str, end)) for end in extras.TRANSFORMERS_RANGE)
    assert f"transformers>={least},<{below}" in optional["executor"]
    assert sorted(map(name_of, optional["serve"])) == sorted(("mtp-plugin", *extras.SERVE_PACKAGES))
    assert {"mtp-plugin[executor]", "mtp-plugin[serve]"} <= set(optional["dev"])


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are imported, which need Triton")
def test_the_plugin_does_without_the_extra() -> None:
    code = """
import importlib, pkgutil
import mtp_plugin
for name, module in mtp_plugin._MODULES.items():
    if not module.startswith("hosts.embedded"):
        getattr(mtp_plugin, name)
names = ["config", "errors", "extras", "hosts", "infer", "ops", "plugin", "requests",
         "speculative"]
done = []
while names:
    module = importlib.import_module("mtp_plugin." + names.pop())
    done.append(module.__name__)
    for found in pkgutil.iter_modules(getattr(module, "__path__", ())):
        name = module.__name__.removeprefix("mtp_plugin.") + "." + found.name
        # subclasses of the host's own classes, and the controller over the embedded executor
        if name not in ("hosts.tensorrt_llm.models", "hosts.vllm.engine", "hosts.vllm.sampler",
                        "hosts.embedded", "hosts.megatron.embedded_context",
                        "hosts.megatron.text_generation_controller"):
            names.append(name)
print(len(done), *sorted({m.split(".")[0] for m in sys.modules if sys.modules[m]}))
"""
    result = process_without(EXTRA, code)
    assert result.returncode == 0, result.stderr
    number, *loaded = result.stdout.split()
    assert int(number) > 100
    assert not set(EXTRA) & set(loaded)


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are imported, which need Triton")
@pytest.mark.parametrize(
    ("arguments", "host"),
    [
        (["--host", "tensorrt_llm"], "tensorrt_llm"),
        (["--host=tensorrt_llm"], "tensorrt_llm"),
        (["--host", "vllm"], "vllm"),
        (["--host", "sglang"], "sglang"),
    ],
)
def test_the_doctor_of_a_host_does_without_the_extra(arguments: list[str], host: str) -> None:
    code = f"""
import sys
from mtp_plugin.__main__ import main
sys.modules[{host!r}] = None
sys.argv[1:] = ["doctor", *{arguments!r}]
main()
"""
    result = without(EXTRA, code)
    assert result.returncode == 1
    problem, last = result.stdout.splitlines()
    assert problem.startswith(f"problem: {host} cannot be imported: ")
    assert last == f"next: mtp-plugin doctor --host {host}  # with this corrected"


@pytest.mark.parametrize(
    ("host", "option", "word"),
    [
        ("vllm", "--model=", "vllm serve"),
        ("sglang", "--model=", "one MTP layer"),
        ("vllm", "", "vllm serve"),
    ],
)
def test_a_checkpoint_is_checked_without_torch_and_the_engine(
    host: str, option: str, word: str
) -> None:
    tiny = Path(__file__).parents[1] / "integration/tiny_model/checkpoint"
    code = (
        f"import sys; sys.argv[1:] = ['doctor', '--host', {host!r}, '{option}{tiny}']\n"
        "from mtp_plugin.__main__ import main; main()"
    )
    lines = without((*EXTRA, "torch", "triton", host), code).stdout.splitlines()
    assert "MTP layers     3 declared, 3 found in model.safetensors" in lines
    assert any(word in line for line in lines)


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are imported, which need Triton")
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_launch_line_is_checked_without_the_extra(engine: str) -> None:
    code = (
        f"import sys; sys.argv[1:] = ['doctor', '--', {engine!r}, 'serve', 'X/Y']\n"
        "from mtp_plugin.__main__ import main; main()"
    )
    result = without((*EXTRA, engine), code)
    assert result.returncode == 0, result.stderr
    assert "starts with the plugin" in result.stdout


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (
            ["--host", "trtllm"],
            "--host: expected one of sglang, tensorrt_llm, vllm, got 'trtllm'",
        ),
        (["--host"], "--host: expected one of sglang, tensorrt_llm, vllm, got ''"),
        (
            ["--host", "tensorrt_llm", "--config", "x.yaml", "--model", "m"],
            "--host tensorrt_llm accepts no other option but --model DIR, or --config FILE",
        ),
        (
            ["--host", "vllm", "--config", "x.yaml"],
            "--host vllm accepts no other option but --model DIR",
        ),
    ],
)
def test_hosts_that_the_doctor_refuses(expected: list[str], message: str) -> None:
    code = (
        f"import sys; sys.argv[1:] = ['doctor', *{expected!r}]\n"
        "from mtp_plugin.__main__ import main; main()"
    )
    result = without(EXTRA, code)
    assert (result.returncode, result.stderr) == (2, f"error: {message}\n")


@pytest.mark.parametrize("package", EXTRA[:3])
@pytest.mark.parametrize("code", WHAT_NEEDS_MODELS)
def test_what_needs_models_says_what_is_missing(code: str, package: str) -> None:
    result = without((package,), code)
    last = result.stderr.splitlines()[-1]
    want = message(WHAT_NEEDS_MODELS[code], package)
    assert last == f"mtp_plugin.errors.MissingExtraError: {want}"


def test_a_model_of_transformers_needs_it() -> None:
    code = "from mtp_plugin.infer import TransformersLanguageModel as T; T(None)"
    last = without(EXTRA, code).stderr.splitlines()[-1]
    assert last.endswith(message("mtp_plugin.infer.TransformersLanguageModel", "transformers"))


@pytest.mark.parametrize("package", EXTRA)
def test_a_command_says_in_one_line_what_is_missing(package: str) -> None:
    result = without((package,), "from mtp_plugin.__main__ import main; main()")
    assert result.stderr == f"error: {message('the command line mtp-plugin', package)}\n"
    assert (result.returncode, result.stdout) == (2, "")


def test_the_script_is_the_same_entry() -> None:
    """Also in a process of its own."""
    module, _, function = PROJECT["scripts"]["mtp-plugin"].partition(":")
    run_module = "import runpy; runpy.run_module('mtp_plugin', run_name='__main__', alter_sys=True)"
    for code in (f"from {module} import {function}; {function}()", run_module):
        result = process_without(EXTRA, code)
        assert result.stderr == f"error: {message('the command line mtp-plugin', *EXTRA)}\n"
        assert (result.returncode, result.stdout) == (2, "")


def test_tools_that_compare_need_models() -> None:
    last = without(("transformers",), "import mtp_plugin.tools.check").stderr.splitlines()[-1]
    assert last.endswith(message("the embedded executor (mtp_plugin.LLM)", "transformers"))


def test_what_the_command_line_shows_needs_all() -> None:
    last = without(("rich",), "import mtp_plugin.tools.terminal.console").stderr.splitlines()[-1]
    assert last.endswith(message("mtp_plugin.tools.terminal", "rich"))


@pytest.mark.parametrize(
    "installed", ["4.57.1", "5.16.0", "5.9.2", "5.25.0", "5.120.1", "6.1.0.dev0", "6.0rc1"]
)
def test_another_transformers_is_named(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "version_of", lambda _: installed)
    want = (
        f"LLM needs the package transformers from version 5.17 and below 5.25, {installed} is "
        f"installed: {INSTALL}"
    )
    with pytest.raises(MissingExtraError, match=f"^{re.escape(want)}$") as caught:
        extras.require("LLM", "transformers")
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, MTPPluginError)


@pytest.mark.parametrize("installed", ["5.17.0", "5.18.0.dev0", "5.24.1", ""])
def test_versions_that_are_used(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "version_of", lambda _: installed)
    extras.require("LLM", *EXTRA)


def test_a_step_without_numpy() -> None:
    """Nothing among the dependencies brings it."""
    code = """
from types import SimpleNamespace
import torch
from mtp_plugin import MTPSampler
args = SimpleNamespace(max_num_sequences=2, max_seq_len=9)
sampler = MTPSampler(args, nextn=1, device="cpu", kernels="reference")
tokens = []
request = SimpleNamespace(
    request_id=0, py_seq_slot=1, py_draft_tokens=[], py_decoding_iter=1, state=2, py_end_id=None,
    py_max_new_tokens=9, py_orig_prompt_len=0, get_num_tokens=lambda _: len(tokens),
    add_new_token=lambda token, _: tokens.append(token),
)
batch = SimpleNamespace(context_requests=[], generation_requests=[request])
outputs = dict(new_tokens=[[5, 6]], next_new_tokens=[[6, 7]], next_draft_tokens=[[7]])
outputs = {name: torch.tensor(rows, dtype=torch.int32) for name, rows in outputs.items()}
outputs["new_tokens_lens"] = torch.tensor([2], dtype=torch.int32)
sampler.update_requests(sampler.sample_async(batch, outputs))
print(tokens)
"""
    done = process_without((*EXTRA, "numpy"), code)
    assert done.stdout.strip() == "[5, 6]", done.stderr


@pytest.mark.parametrize("package", extras.SERVE_PACKAGES)
def test_server_names_its_own_extra(package: str) -> None:
    last = without((package,), "import mtp_plugin.serving").stderr.splitlines()[-1]
    want = message("mtp-plugin serve", package).replace("[executor]", "[serve]")
    assert last == f"mtp_plugin.errors.MissingExtraError: {want}"


def test_command_of_vllm_is_that_of_its_page() -> None:
    for file in (VLLM_PAGE, Path(__file__).parents[1] / "README.md"):
        page = file.read_text().replace("\\\n", " ")
        serve = re.search(r"^vllm serve MODEL .*", page, re.MULTILINE)
        assert serve is not None
        assert shlex.split(vllm_command("MODEL")) == shlex.split(serve[0])
    assert "--speculative-config" not in vllm_command("MODEL", 0)
    assert "'two words'" in vllm_command("two words")
