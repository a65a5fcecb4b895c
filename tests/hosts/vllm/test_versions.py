"""Which vLLM versions are recognized, by the parameters of their methods."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from mtp_plugin.errors import HostError
from mtp_plugin.hosts.vllm.versions import (
    SIGNATURES,
    differences,
    fitting_module,
    is_tested,
    parameters,
    release,
)
from tests.hosts.vllm import fake_vllm

SAMPLER = "vllm.v1.worker.gpu.sample.sampler:Sampler"


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_module_of_the_found_signatures_is_returned(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module = ModuleType(f"mtp_plugin.hosts.vllm.{name}")  # the real one needs vLLM
    monkeypatch.setitem(sys.modules, module.__name__, module)
    fake_vllm.install(monkeypatch, signatures=SIGNATURES[name])
    assert fitting_module() is module
    for other in set(SIGNATURES) - {name}:
        assert differences(SIGNATURES[other])


def test_a_missing_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    signatures = dict(SIGNATURES["v32"])
    del signatures[f"{SAMPLER}.apply_staged_writes"]
    fake_vllm.install(monkeypatch, "0.35.2", signatures)
    with pytest.raises(HostError) as error:
        fitting_module()
    assert str(error.value) == (
        "mtp_plugin does not fit vLLM 0.35: vllm.v1.worker.gpu.sample.sampler.Sampler."
        "apply_staged_writes is missing. Supported versions: 0.24, 0.26, 0.32"
    )


def test_methods_with_other_parameters_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    signatures = dict(SIGNATURES["v32"])
    signatures[f"{SAMPLER}.add_request"] = ("req_idx", "params", "lora")
    fake_vllm.install(monkeypatch, "0.33.0", signatures)
    with pytest.raises(HostError) as error:
        fitting_module()
    assert str(error.value) == (
        "mtp_plugin does not fit vLLM 0.33: vllm.v1.worker.gpu.sample.sampler.Sampler.add_request"
        "(req_idx, params, lora) was expected to have the parameters (req_idx, sampling_params). "
        "Supported versions: 0.24, 0.26, 0.32"
    )


def test_the_nearest_version_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    signatures = dict(SIGNATURES["v24"])
    del signatures[f"{SAMPLER}.sample"]
    fake_vllm.install(monkeypatch, "0.24.0", signatures)
    with pytest.raises(HostError) as error:
        fitting_module()
    assert str(error.value).count("missing") == 1
    assert "expected" not in str(error.value)


def test_a_package_without_any_of_the_modules_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch, "0.8.5", {"vllm.engine:run": ("x",)})
    with pytest.raises(HostError, match=r"does not fit vLLM 0\.8: .* is missing"):
        fitting_module()


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.32.0", (0, 32)),
        ("0.24.0rc1", (0, 24)),
        ("0.26.1.dev5+g1234.cu130", (0, 26)),
        ("1.2", (1, 2)),
    ],
)
def test_release(monkeypatch: pytest.MonkeyPatch, version: str, expected: tuple[int, int]) -> None:
    fake_vllm.install(monkeypatch, version)
    assert release() == expected
    assert is_tested() == (expected < (1, 0))


def test_a_version_without_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch, "dev")
    with pytest.raises(HostError, match=r"expected a version such as 0\.32\.0, got 'dev'"):
        release()


def test_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)
    assert parameters(f"{SAMPLER}.add_request") == ("req_idx", "sampling_params")
    assert (
        parameters("vllm.v1.worker.gpu.spec_decode.rejection_sampler:gather_draft_sampled")
        == (
            SIGNATURES["v32"][
                "vllm.v1.worker.gpu.spec_decode.rejection_sampler:gather_draft_sampled"
            ]
        )
    )
    assert parameters(f"{SAMPLER}.nothing") is None
    assert parameters("vllm.nothing:f") is None
