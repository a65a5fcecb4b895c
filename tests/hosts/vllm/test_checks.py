"""``mtp-plugin doctor --host vllm``."""

from __future__ import annotations

import io
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mtp_plugin.hosts.vllm import checks
from mtp_plugin.hosts.vllm.checks import Examination, examine, main, show
from mtp_plugin.hosts.vllm.versions import NAMES, SIGNATURES
from mtp_plugin.hosts.vllm.wrapping import START, WORKER
from tests.hosts.vllm import fake_vllm

DRAFTS = "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.sample_draft"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the distribution were installed."""
    monkeypatch.setattr(checks, "entry_points", lambda **_: [SimpleNamespace(name="mtp_plugin")])


def output_of(seen: Examination) -> list[str]:
    out = io.StringIO()
    show(seen, out)
    return out.getvalue().splitlines()


def test_a_supported_version(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)
    seen = examine({})
    first, methods = output_of(seen)
    assert first == "vllm 0.32.0, tested on CPU: fits"
    wrapped, used = len(START) + len(WORKER), len(SIGNATURES) + len(NAMES)
    assert methods == f"methods: {wrapped} wrapped, {used - wrapped} used, all as expected"
    assert seen.exit_code == 0


def test_an_older_version_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch, "0.26.0", {DRAFTS: ("states",)})
    (line,) = output_of(examine({}))
    assert line.startswith("problem: mtp_plugin does not fit vLLM 0.26: it needs vLLM 0.32 or ")


def test_a_missing_method(monkeypatch: pytest.MonkeyPatch) -> None:
    signatures = {name: s for name, s in SIGNATURES.items() if name != DRAFTS}
    fake_vllm.install(monkeypatch, "0.32.0", signatures)
    seen = examine({})
    lines = output_of(seen)
    name = DRAFTS.replace(":", ".")
    assert lines[0] == "vllm 0.32.0, tested on CPU: does not fit"
    assert f"  NO   wrapped  {name}  missing" in lines
    assert len(lines) > len(SIGNATURES)  # with those that fit
    assert lines[-1].startswith(f"problem: mtp_plugin does not fit vLLM 0.32: {name} is missing")
    assert seen.exit_code == 1


def test_other_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch, "0.34.0", {**SIGNATURES, DRAFTS: ("states", "rows")})
    seen = examine({})
    lines = output_of(seen)
    name = DRAFTS.replace(":", ".")
    assert lines[0] == "vllm 0.34.0, not tested: does not fit"
    assert f"  NO   wrapped  {name}  (states=None, rows=None)" in lines
    (problem,) = seen.problems
    assert f"{name}(states=None, rows=None) was expected to have the parameters (hidden" in problem
    assert "Install vLLM 0.33" in problem


def test_an_untested_version(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch, "0.34.0")
    seen = examine({})
    assert output_of(seen)[0] == "vllm 0.34.0, not tested: fits"
    assert not seen.problems
    assert seen.notes[0].startswith(
        "warning: vLLM 0.34.0 was not tested (tested: 0.32 on CPU; 0.33 on GPU and CPU)"
    )
    assert seen.exit_code == 0


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        (
            {"VLLM_PLUGINS": "a,b"},
            "VLLM_PLUGINS=a,b leaves out mtp_plugin: add it, or unset it",
        ),
        ({"VLLM_PLUGINS": ""}, "VLLM_PLUGINS= leaves out mtp_plugin: add it, or unset it"),
        ({"VLLM_PLUGINS": "a,mtp_plugin"}, None),
    ],
)
def test_environment_variables(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], problem: str | None
) -> None:
    fake_vllm.install(monkeypatch)
    seen = examine(environment)
    assert seen.problems == ([] if problem is None else [problem])


def test_triton_that_vllm_has_switched_off_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.32 uses the V1 runner then."""
    modules = fake_vllm.install(monkeypatch)
    modules["vllm.triton_utils"].HAS_TRITON = False  # type: ignore[attr-defined]
    seen = examine({})
    (problem,) = seen.problems
    assert problem.startswith("vLLM has switched Triton off here")
    assert not seen.notes


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM finds the plugin by its entry point alone."""
    monkeypatch.setattr(checks, "entry_points", lambda **_: [])
    fake_vllm.install(monkeypatch)
    assert examine({}).problems == [
        "the entry point mtp_plugin of the group vllm.general_plugins is missing: in "
        "the environment of vLLM and a clone of the repository, type pip install --no-deps ."
    ]


def test_without_vllm_it_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert main() == 1
    line, _ = capsys.readouterr().out.splitlines()
    assert line.startswith("problem: vllm cannot be imported: ")


@pytest.mark.parametrize("version", ["dev", ""])
def test_a_version_without_numbers(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    fake_vllm.install(monkeypatch, version)
    assert output_of(examine({})) == [
        f"problem: vLLM: expected a version such as 0.32.0, got {version!r}"
    ]


def test_the_module_runs_the_same_check() -> None:
    code = (
        "import sys, runpy; sys.modules['vllm'] = None\n"
        "runpy.run_module('mtp_plugin.hosts.vllm', run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stdout.startswith("problem: vllm cannot be imported: ")
