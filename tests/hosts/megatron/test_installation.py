"""`install`, `uninstall` and `status` with a module that has the names of Megatron's controller."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from mtp_plugin.errors import ConfigError, HostError
from mtp_plugin.hosts import megatron
from mtp_plugin.hosts.megatron import mtp_utils_pytorch
from mtp_plugin.hosts.megatron.installation import CONTROLLER, FUNCTIONS, SAMPLING_CLASSES


class Sampling:
    def __init__(self, rng: Any, vocab_size: int) -> None:
        self._rng, self._vocab_size = rng, vocab_size

    def sample_kernel(
        self,
        logits,
        n,
        context,
        *,
        no_top_k,
        no_top_p,
        gather_indices=None,
        token_to_request_index=None,
        output=None,
        eager=False,
        cache_key=None,
    ):
        raise NotImplementedError

    def sample_speculative(
        self,
        required_logits,
        num_decode,
        num_prefill,
        num_speculative_tokens,
        context,
        *,
        gather_indices=None,
        eager=False,
        cache_key=None,
    ):
        raise NotImplementedError


def verify_speculative_tokens(
    input_tokens, output_tokens, num_decode_requests, num_prefill_requests, num_speculative_tokens
): ...


def rewind_kv_cache(
    accepted_counts,
    prefill_status,
    last_kv_block_offset,
    kv_length_offsets,
    kv_block_counts,
    last_kv_block_id,
    kv_block_ids,
    num_speculative_tokens,
    block_size_tokens,
    num_active_requests=None,
): ...


def prepare_next_forward_pass(
    num_decode_requests,
    output_tokens,
    required_logit_indices,
    last_one_indices,
    accepted_tokens_mask,
    input_tokens,
    sampled_tokens_buf,
    last_accepted_seq_buf,
    accepted_tokens_per_request,
    accepted_token_counts,
    num_speculative_tokens,
): ...


def mamba_state_selective_copy(
    intermediate_states, current_states, prefill_status, state_idx, accepted_counts, num_layers
): ...


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The controller's module, with all its parent packages."""
    parts = CONTROLLER.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        module = ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["megatron.core"].__version__ = "0.19.2"  # type: ignore[attr-defined]
    module = sys.modules[CONTROLLER]
    for function in (
        verify_speculative_tokens,
        rewind_kv_cache,
        prepare_next_forward_pass,
        mamba_state_selective_copy,
    ):
        setattr(module, function.__name__, function)
    for name in SAMPLING_CLASSES:
        setattr(module, name, type(name, (Sampling,), {}))
    yield module
    for name in (*FUNCTIONS, *SAMPLING_CLASSES):
        if name in megatron.installation._originals:
            setattr(module, name, megatron.installation._ours[name])
    if megatron.status().installed:
        megatron.uninstall()


def names_of(module: ModuleType) -> dict[str, Any]:
    return {name: vars(module).get(name) for name in (*FUNCTIONS, *SAMPLING_CLASSES)}


def test_install_replaces_four_functions(controller: ModuleType) -> None:
    before = names_of(controller)
    status = megatron.install()
    assert status.installed
    assert status.replaced == tuple(FUNCTIONS)
    assert not status.sampling
    assert status == megatron.status()
    changed = [name for name, value in names_of(controller).items() if value is not before[name]]
    assert changed == list(FUNCTIONS)
    megatron.uninstall()
    assert names_of(controller) == before
    assert str(megatron.status()) == "mtp_plugin is not installed in Megatron-Core"


@pytest.mark.parametrize("kernels", ["auto", "reference", "triton"])
def test_replaced_functions_compute_as_the_drop_in_modules(
    controller: ModuleType, kernels: str
) -> None:
    megatron.install(kernels=kernels)
    read, made = torch.tensor([1, 2, 3, 4, 9]), torch.tensor([2, 3, 5, 6, 7])
    expected = mtp_utils_pytorch.verify_speculative_tokens(read, made, 1, 1, 3)
    for found in (
        controller.verify_speculative_tokens(read, made, 1, 1, 3),
        controller.verify_speculative_tokens(
            input_tokens=read,
            output_tokens=made,
            num_decode_requests=1,
            num_prefill_requests=1,
            num_speculative_tokens=3,
        ),
    ):
        assert all(map(torch.equal, found, expected))


def test_sampling_classes_are_subclasses(controller: ModuleType) -> None:
    before = names_of(controller)
    status = megatron.install(sampling=True)
    assert status.sampling
    for name in SAMPLING_CLASSES:
        assert issubclass(getattr(controller, name), before[name])
        assert getattr(controller, name).__name__ == f"Plugin{name}"
    assert str(status).startswith("mtp_plugin is installed in Megatron-Core 0.19.2: rewind_kv_")


def test_the_documented_snippet_runs(
    controller: ModuleType,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = names_of(controller)
    text = str(megatron.__doc__).split("::\n", 1)[1]
    snippet = textwrap.dedent("".join(re.findall(r"(?m)^(?: {4}.*)?\n", text.split("\n``")[0])))
    exec(snippet, {})
    assert "mtp_plugin is installed in Megatron-Core" in capsys.readouterr().out
    assert names_of(controller) == before


def change(module: ModuleType, what: str) -> None:
    if what == "no function":
        del module.rewind_kv_cache
    elif what == "no callable":
        module.verify_speculative_tokens = 5  # type: ignore[attr-defined]
    elif what == "parameter":
        module.mamba_state_selective_copy = lambda states: None  # type: ignore[attr-defined]  # noqa: ARG005
    elif what == "no class":
        del module.FlashInferSampling
    elif what == "method":
        module.TorchSampling.sample_kernel = lambda self, logits: None  # noqa: ARG005


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no function", "rewind_kv_cache: expected a function, got no such name"),
        ("no callable", "verify_speculative_tokens: expected a function, got int"),
        ("parameter", r"mamba_state_selective_copy: expected the parameters \[.*, got \['states'"),
        ("no class", "FlashInferSampling: expected a class, got NoneType"),
        ("method", r"TorchSampling.sample_kernel: expected the parameters \[.*, got \['self', 'lo"),
    ],
)
def test_another_controller_is_refused_by_name(
    controller: ModuleType, what: str, message: str
) -> None:
    change(controller, what)
    before = names_of(controller)
    with pytest.raises(HostError, match=f"is not supported, nothing was changed: .*{message}"):
        megatron.install(sampling=True)
    assert names_of(controller) == before
    assert not megatron.status().installed


def test_wrong_calls_are_refused(controller: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HostError, match=r"uninstall\(\): mtp_plugin is not installed"):
        megatron.uninstall()
    with pytest.raises(ConfigError, match="expected auto, torch, triton or reference, got 'cuda'"):
        megatron.install(kernels="cuda")
    megatron.install()
    with pytest.raises(HostError, match="is installed in this process already"):
        megatron.install()
    ours = controller.rewind_kv_cache
    controller.rewind_kv_cache = rewind_kv_cache  # type: ignore[attr-defined]
    with pytest.raises(HostError, match="other code replaced rewind_kv_cache of"):
        megatron.uninstall()
    controller.rewind_kv_cache = ours  # type: ignore[attr-defined]
    megatron.uninstall()
    monkeypatch.setitem(sys.modules, CONTROLLER, None)  # type: ignore[arg-type]
    with pytest.raises(HostError, match=f"{CONTROLLER} cannot be imported"):
        megatron.install()
