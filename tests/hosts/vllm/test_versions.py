"""Which vLLM versions are recognized, by the parameters of their methods."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from integration.vllm.signatures import Wheel, main, report, stored
from mtp_plugin.errors import HostError
from mtp_plugin.hosts.vllm.versions import (
    NAMES,
    PARTS,
    REPLACED,
    SAMPLE_DRAFT,
    SIGNATURES,
    WRAPPED,
    differences,
    expect_fitting,
    mismatch,
    part_problems,
    release,
    replaces,
    where_tested,
)
from mtp_plugin.speculative.host.signatures import INSTALLED
from tests.hosts.vllm import fake_vllm

SAMPLER = "vllm.v1.worker.gpu.sample.sampler:Sampler"
INSTEAD = "Install vLLM 0.33, or leave out additional_config.mtp_plugin"
NUM_NANS = "vllm.v1.worker.gpu.metrics.logits:get_num_nans"


def test_methods_with_other_parameters_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    signatures = dict(SIGNATURES)
    signatures[f"{SAMPLER}.add_request"] = ("req_idx", "params", "lora")
    fake_vllm.install(monkeypatch, "0.33.0", signatures)
    with pytest.raises(HostError) as error:
        expect_fitting()
    assert str(error.value) == (
        "mtp_plugin does not fit vLLM 0.33: vllm.v1.worker.gpu.sample.sampler.Sampler.add_request"
        "(req_idx=None, params=None, lora=None) was expected to have the parameters (req_idx, "
        f"sampling_params). {INSTEAD}"
    )


def test_an_older_version_is_one_sentence_with_the_command_that_installs_a_served_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_vllm.install(monkeypatch, "0.26.0", {"vllm.engine:run": ("x",)})
    with pytest.raises(HostError) as error:
        expect_fitting()
    assert str(error.value) == (
        "mtp_plugin does not fit vLLM 0.26: it needs vLLM 0.32 or newer; type pip install "
        '"vllm>=0.32", or leave out additional_config.mtp_plugin'
    )
    fake_vllm.install(monkeypatch, "0.26.0")
    expect_fitting()  # what fits is recognized by its signatures


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.32.0", (0, 32)),
        ("0.32.0rc1", (0, 32)),
        ("0.33.1.dev5+g1234.cu130", (0, 33)),
        ("1.2", (1, 2)),
    ],
)
def test_release(monkeypatch: pytest.MonkeyPatch, version: str, expected: tuple[int, int]) -> None:
    fake_vllm.install(monkeypatch, version)
    assert release() == expected
    assert (where_tested() is not None) == (expected < (1, 0))


def test_a_version_without_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch, "dev")
    with pytest.raises(HostError, match=r"expected a version such as 0\.32\.0, got 'dev'"):
        release()


def test_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)
    assert INSTALLED.parameters(f"{SAMPLER}.add_request") == (
        "req_idx=None",
        "sampling_params=None",
    )
    assert INSTALLED.parameters(NUM_NANS) == ("logits",)
    assert INSTALLED.parameters(f"{SAMPLER}.nothing") is None
    assert INSTALLED.parameters("vllm.nothing:f") is None


class Recorded:
    """A version with all that an engine needs, but for given parameters and names."""

    def __init__(self, parameters: Any = (), without: tuple[str, ...] = ()) -> None:
        self._parameters = {**SIGNATURES, **dict(parameters)}
        self._without = without

    def parameters(self, target: str) -> tuple[str, ...] | None:
        return self._parameters.get(target)

    def names(self, target: str) -> frozenset[str] | None:
        return frozenset(NAMES.get(target, ())).difference(self._without)


@pytest.mark.parametrize("target", SIGNATURES)
@pytest.mark.parametrize("further", ["more", "more=None", "*more", "**more"])
def test_parameters_that_follow_the_known_ones(target: str, further: str) -> None:
    """Any of a method that is only wrapped, optional ones of the others."""
    found = {target: (*SIGNATURES[target], further)}
    fits = target in WRAPPED or further != "more"
    assert (not differences(Recorded(found))) == fits
    assert target not in REPLACED or target not in WRAPPED


def test_parameters_that_come_earlier_are_refused() -> None:
    for target, names in SIGNATURES.items():
        problem = mismatch(target, names, Recorded({target: ("more=None", *names)}))
        assert (problem is None) == (names == ())


@pytest.mark.parametrize("target", NAMES)
def test_attributes_that_are_missing_are_named(target: str) -> None:
    name = NAMES[target][-1]
    found = differences(Recorded(without=(name,)))
    assert f"{target.replace(':', '.')} has no {name}" in found


STORED = {
    "0.31.0": ["RejectionSampler.__call__", "sample_draft", "compute_draft_logits"],
    "0.32.0": [],
    "0.33.0": [],
}


def test_versions_of_vllm_that_fit() -> None:
    found = {version: differences(reader) for version, reader in stored().items()}
    assert found.keys() == STORED.keys()
    for version, methods in STORED.items():
        for problem, method in zip(found[version], methods, strict=True):
            assert problem.partition("(")[0].partition(" ")[0].endswith(method)


@pytest.mark.parametrize("part", PARTS)
def test_parts_that_an_engine_can_do_without_are_compared(part: str) -> None:
    versions = stored()
    assert [part_problems(part, versions[name]) for name in ("0.32.0", "0.33.0")] == [[], []]
    fits, *problems = report("0.34.0", Recorded())  # without any of them
    assert fits == "vllm 0.34.0: fits"
    for target in PARTS[part][0]:
        assert f"  {part}: {target.replace(':', '.')} is missing" in problems


WHEEL = {
    "vllm/a.py": """
from vllm.b import Base, f as g
class Owner(Base):
    x: int
    def __init__(self, a, *, b=1):
        self.y, self.z[0] = a, b
class Fields:
    first: int
    second: "str | None" = None
LIMIT = -1
""",
    "vllm/b/__init__.py": """
class Base:
    def method(self, a, b=(1, 2), *c, d, **e):
        self.w = 1
def f(x, y=2): ...
""",
}


def test_a_wheel_is_read_without_importing_it(tmp_path: Path) -> None:
    for name, text in WHEEL.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    wheel = Wheel(tmp_path)
    assert wheel.parameters("vllm.a:Owner.method") == ("a", "b=...", "*c", "d", "**e")
    assert wheel.parameters("vllm.a:Owner") == ("a", "b=1")
    assert wheel.parameters("vllm.a:Fields") == ("first", "second=None")
    assert wheel.parameters("vllm.a:g") == ("x", "y=2")
    assert wheel.parameters("vllm.a:h") is None
    assert wheel.parameters("vllm.c:f") is None
    assert wheel.names("vllm.a:Owner") == {"x", "y", "w", "__init__", "method"}
    assert "LIMIT" in (wheel.names("vllm.a") or ())


def test_the_command_prints_every_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([]) == 1  # stored ones do not fit
    lines = capsys.readouterr().out.splitlines()
    assert "vllm 0.33.0: fits" in lines
    assert "vllm 0.31.0: does not fit:" in lines
    assert main([str(tmp_path)]) == 1


def test_versions_that_cannot_be_read_leave_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], **_given: Any) -> None:
        error = "ERROR: Could not find a version\nERROR: No matching distribution found\n"
        raise subprocess.CalledProcessError(1, command, stderr=error)

    monkeypatch.setattr(subprocess, "run", run)
    (tmp_path / "vllm-0.40.0.whl").write_text("no zip")
    for name in ("vllm-0.41.0", "vllm-0.42.0"):
        (tmp_path / name).mkdir()
    given = (f"{tmp_path}/vllm-0.41.0", f"{tmp_path}/vllm-0.40.0.whl", "99.0")
    assert main([*given, f"{tmp_path}/vllm-0.42.0"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line[0] != " "]
    assert [line.partition(": ")[0] for line in lines] == [
        "vllm 0.41.0",
        given[1],
        "99.0",
        "vllm 0.42.0",
    ]
    assert lines[1:3] == [
        f"{given[1]}: cannot be read: File is not a zip file",
        "99.0: cannot be read: No matching distribution found",
    ]


def test_arguments_that_are_not_known_are_taken_at_their_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As ``num_steps`` of vLLM 0.33."""
    modules = fake_vllm.install(monkeypatch)
    owner: Any = modules[SAMPLE_DRAFT.partition(":")[0]].DraftModelSpeculator
    scope: dict[str, Any] = {}
    names = SIGNATURES[SAMPLE_DRAFT]
    exec(f"def f(self, {', '.join(names)}, num_steps=1, mask=None): ...", scope)
    owner.sample_draft = scope["f"]
    ours = replaces(SAMPLE_DRAFT)(lambda _owner, *args, **kwargs: (args, kwargs))
    assert ours(None, *names) == (names, {})
    assert ours(None, *names, 1) == (names, {})
    assert ours(None, *names, num_steps=1, mask=None) == (names, {})
    assert ours(None, *names[:-1], spec_step_idx=2, num_steps=1) == (
        names[:-1],
        {"spec_step_idx": 2},
    )
    for args, kwargs, shown in (
        ((2,), {}, "num_steps=1 alone, got 2"),
        ((), {"num_steps": 3}, "num_steps=1 alone, got 3"),
        ((1, "m"), {}, "mask=None alone, got 'm'"),
    ):
        with pytest.raises(HostError, match=shown):
            ours(None, *names, *args, **kwargs)
    ours = replaces(SAMPLE_DRAFT, unused=("num_steps",))(lambda _owner, *args: args)
    assert ours(None, *names, num_steps=3) == names  # DFlash in 0.33
    with pytest.raises(HostError, match="mask=None alone"):
        ours(None, *names, num_steps=3, mask=1)


def test_every_replacement_takes_unknown_arguments() -> None:
    """Read as text: the module needs vLLM."""
    text = Path(release.__code__.co_filename).with_name("sampler.py").read_text(encoding="utf-8")
    for constant in ("SAMPLE", "SAMPLE_DRAFT", "SAMPLE_LOGITS", "VERIFY"):
        assert re.search(rf"@replaces\({constant}(, unused=.+)?\)\n", text)


def test_attributes_of_what_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Base:
        a: int

        def set_up(self) -> None:
            self.b = 1

    class Owner(Base):
        @property
        def c(self) -> int:
            return self.unknown  # type: ignore[attr-defined,no-any-return]

    monkeypatch.setitem(sys.modules, "vllm_x", SimpleNamespace(Owner=Owner, LIMIT=1))  # type: ignore[arg-type]
    names = INSTALLED.names("vllm_x:Owner") or frozenset()
    assert {"a", "b", "c", "set_up"} <= names
    assert "unknown" not in names
    assert "LIMIT" in (INSTALLED.names("vllm_x") or ())
    assert INSTALLED.names("vllm_x:Other") is None
