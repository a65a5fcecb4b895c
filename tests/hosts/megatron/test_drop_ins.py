"""The drop-in modules: names, signatures, a step of Megatron's controller, refused arguments."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.hosts.megatron import mtp_utils_pytorch, mtp_utils_triton
from mtp_plugin.ops.backend import Backend
from tests.ops.letters import ids
from tests.ops.on_device import poisoned, vector

both = pytest.mark.parametrize(
    "utils", [mtp_utils_pytorch, mtp_utils_triton], ids=["pytorch", "triton"]
)

PARAMETERS = {
    "verify_speculative_tokens": (
        "input_tokens output_tokens num_decode_requests num_prefill_requests num_speculative_tokens"
    ),
    "prepare_next_forward_pass": (
        "num_decode_requests output_tokens required_logit_indices last_one_indices "
        "accepted_tokens_mask input_tokens sampled_tokens_buf last_accepted_seq_buf "
        "accepted_tokens_per_request accepted_token_counts num_speculative_tokens"
    ),
    "rewind_kv_cache": (
        "accepted_counts prefill_status last_kv_block_offset kv_length_offsets kv_block_counts "
        "last_kv_block_id kv_block_ids num_speculative_tokens block_size_tokens num_active_requests"
    ),
    "mamba_state_selective_copy": (
        "intermediate_states current_states prefill_status state_idx accepted_counts num_layers"
    ),
    "required_logit_indices": "prefill_status query_lengths num_decode num_prefill",
}


@both
@pytest.mark.parametrize("name", PARAMETERS)
def test_signatures_equal_those_of_megatron(utils: ModuleType, name: str) -> None:
    """Added arguments are keyword-only and optional."""
    parameters = inspect.signature(getattr(utils, name)).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == PARAMETERS[name].split()
    assert all(p.default is None for p in parameters if p.kind is p.KEYWORD_ONLY)


@both
@pytest.mark.parametrize("name", PARAMETERS)
def test_the_backend_is_fixed(utils: ModuleType, name: str) -> None:
    """A drop-in has the name and the docstring of its function, and takes no backend."""
    op = getattr(utils, name)
    assert op.__name__ == name
    assert "Args:" in op.__doc__
    assert "backend" not in inspect.signature(op).parameters
    assert "backend" not in op.__annotations__
    assert "backend" in inspect.signature(op.__wrapped__).parameters
    assert "backend" in op.__wrapped__.__annotations__
    with pytest.raises(TypeError, match="backend"):
        op(backend=Backend.TORCH)


MEGATRON_KERNELS = {
    "_mamba_state_selective_copy_kernel",
    "_prepare_next_forward_pass_kernel",
    "_rewind_kv_cache_kernel",
    "_verify_speculative_tokens_kernel",
}


def test_kernels_have_the_names_of_megatron() -> None:
    for name in MEGATRON_KERNELS:
        kernel = getattr(mtp_utils_triton, name)
        assert kernel.fn.__name__ == name


def test_both_modules_have_the_same_names() -> None:
    assert mtp_utils_pytorch.__all__ == mtp_utils_triton.__all__
    for name in PARAMETERS:
        assert getattr(mtp_utils_pytorch, name) is not getattr(mtp_utils_triton, name)
        of_pytorch, of_triton = (
            inspect.signature(getattr(utils, name))
            for utils in (mtp_utils_pytorch, mtp_utils_triton)
        )
        assert of_pytorch == of_triton


@both
def test_a_step_of_the_controller(utils: ModuleType) -> None:
    """Two decode requests, a prompt of four tokens, S = 2: `b` is accepted, then both of `e f`."""
    max_requests, num_drafts = 5, 2
    status = vector([0, 0, 1], torch.int32)
    lengths = vector([3, 3, 4], torch.int32)
    packed = vector([ids("abc def pqrs")])
    rows = utils.required_logit_indices(status, lengths, 2, 1)
    assert torch.equal(rows, vector([0, 1, 2, 3, 4, 5, 9]))

    outputs = vector(ids("bxy efg t"))
    last, mask, required = utils.verify_speculative_tokens(
        input_tokens=packed[0, rows],
        output_tokens=outputs,
        num_decode_requests=2,
        num_prefill_requests=1,
        num_speculative_tokens=num_drafts,
    )
    sampled, sequence = poisoned(max_requests), poisoned(max_requests)
    drafts = vector([[-1] * num_drafts] * max_requests)
    counts = torch.zeros_like(sampled)
    utils.prepare_next_forward_pass(
        num_decode_requests=2,
        output_tokens=outputs,
        required_logit_indices=rows,
        last_one_indices=last,
        accepted_tokens_mask=mask,
        input_tokens=required,
        sampled_tokens_buf=sampled,
        last_accepted_seq_buf=sequence,
        accepted_tokens_per_request=drafts,
        accepted_token_counts=counts,
        num_speculative_tokens=num_drafts,
    )
    assert torch.equal(sampled[:3], vector(ids("xgt")))
    assert torch.equal(sequence[:3], vector([1, 5, 9]))
    assert torch.equal(drafts[:3], vector([ids("b."), ids("ef"), ids("..")]))
    assert torch.equal(counts, vector([1, 2, 0, 0, 0]))

    offset, length = vector([0, 0, 3], torch.int32), vector([13, 13, 4], torch.int32)
    blocks, last_block = vector([4, 4, 1], torch.int32), vector([9, 8, 7], torch.int32)
    table = vector([[1, 2, 3, 9], [4, 5, 6, 8], [7, -1, -1, -1]], torch.int32)
    released, removed = utils.rewind_kv_cache(
        accepted_counts=counts[:3],
        prefill_status=status,
        last_kv_block_offset=offset,
        kv_length_offsets=length,
        kv_block_counts=blocks,
        last_kv_block_id=last_block,
        kv_block_ids=table,
        num_speculative_tokens=num_drafts,
        block_size_tokens=4,
        num_active_requests=3,
    )
    assert released[removed].tolist() == [9]
    assert released.tolist() == [9, 8, 7]
    assert offset.tolist() == [3, 0, 3]
    assert length.tolist() == [12, 13, 4]
    assert blocks.tolist() == [3, 4, 1]
    assert last_block.tolist() == [3, 8, 7]
    assert table.tolist() == [[1, 2, 3, -1], [4, 5, 6, 8], [7, -1, -1, -1]]

    states = vector(range(2 * 4 * 3)).view(2, 4, 3, 1).to(torch.bfloat16)
    current = torch.full((2, 4, 1), -1, dtype=torch.bfloat16, device=states.device)
    utils.mamba_state_selective_copy(
        intermediate_states=states,
        current_states=current,
        prefill_status=status,
        state_idx=vector([3, 0, 1], torch.int32),
        accepted_counts=counts[:3],
        num_layers=2,
    )
    assert current[:, :, 0].tolist() == [[2, -1, -1, 10], [14, -1, -1, 22]]


def test_without_triton_the_import_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    name = mtp_utils_triton.__name__
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match="mtp_utils_pytorch has the same functions without it"):
        importlib.import_module(name)


REFUSALS = """
import sys

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.hosts.megatron import mtp_utils_pytorch

assert "triton" not in sys.modules
assert not [m for m in sys.modules if m.startswith(("mtp_plugin.hosts.embedded", "transformers"))]

from mtp_plugin.hosts.megatron import mtp_utils_triton as utils

one, two = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
mask, table = torch.zeros(2, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.int64)
calls = {
    "verify_speculative_tokens": (two, two, 1, 0, 1),
    "required_logit_indices": (one, one, 1, 0),
    "prepare_next_forward_pass": (1, two, two, one, mask, two, one, one, table, one, 1),
    "rewind_kv_cache": (one, one, one, one, one, one, table, 1, 4),
    "mamba_state_selective_copy": (table.view(1, 1, 1), table, one, one, one, 1),
}
for name, arguments in calls.items():
    try:
        getattr(utils, name)(*arguments)
    except TensorContractError as error:
        assert "TRITON_INTERPRET=1" in str(error), error
        print(name)
"""


def test_tensors_on_the_cpu_are_refused() -> None:
    """In a process without the interpreter, into which the package loads no executor."""
    environment = {key: os.environ[key] for key in os.environ if key != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", REFUSALS],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert sorted(ran.stdout.split()) == sorted(PARAMETERS), ran.stderr


NO_TENSORS = {
    "verify_speculative_tokens": ["input_tokens", "output_tokens", "out"],
    "required_logit_indices": ["prefill_status", "query_lengths", "out"],
    "prepare_next_forward_pass": PARAMETERS["prepare_next_forward_pass"].split()[1:-1],
    "rewind_kv_cache": [*PARAMETERS["rewind_kv_cache"].split()[:7], "out"],
}
NO_INTEGERS = {
    "verify_speculative_tokens": PARAMETERS["verify_speculative_tokens"].split()[2:],
    "required_logit_indices": ["num_decode", "num_prefill", "num_speculative_tokens"],
    "prepare_next_forward_pass": ["num_decode_requests", "num_speculative_tokens"],
    "rewind_kv_cache": PARAMETERS["rewind_kv_cache"].split()[7:],
}


def arguments_of(name: str) -> dict[str, Any]:
    """A decode request with one draft."""
    one, two = vector([0]), vector([0, 0])
    mask, table = vector([0, 0], torch.bool), vector([[0]])
    buffers = [one.clone(), one.clone(), table.clone(), one.clone()]
    kv = [one.clone(), one.clone(), one.clone(), one.clone(), table.clone()]
    values = {
        "verify_speculative_tokens": (two, two, 1, 0, 1),
        "required_logit_indices": (one, vector([2]), 1, 0),
        "prepare_next_forward_pass": (1, two, two, one, mask, two, *buffers, 1),
        "rewind_kv_cache": (one, one, *kv, 1, 4, 1),
    }[name]
    parameters = inspect.signature(getattr(mtp_utils_pytorch, name)).parameters
    return dict(zip(parameters, values, strict=False))


@both
@pytest.mark.parametrize("name", NO_TENSORS)
def test_arguments_that_are_no_tensor_or_integer_are_refused(utils: ModuleType, name: str) -> None:
    function, arguments = getattr(utils, name), arguments_of(name)
    function(**arguments)
    wrong: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(NO_TENSORS[name], ([0, 0], 5, "tokens")),
        **dict.fromkeys(NO_INTEGERS[name], (1.0, "1", True, [1])),
    }
    for argument, values in wrong.items():
        for value in values:
            with pytest.raises(TensorContractError, match=f"^{argument}.*: expected"):
                function(**{**arguments, argument: value})
