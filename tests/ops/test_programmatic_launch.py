"""Which devices kernels reach, how launches follow one another, and which are seen again."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

import mtp_plugin
from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops import launching, programmatic_launch
from mtp_plugin.ops.launching import CachedLaunches, expect_reachable
from mtp_plugin.ops.programmatic_launch import pdl_options

CUDA = torch.device("cuda", 0)
FLOATS, OTHERS, HALVES = torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)
DTYPES = {tensor.data_ptr(): tensor.dtype for tensor in (FLOATS, FLOATS[1:], OTHERS, HALVES)}


class Binary:
    """What a kernel was compiled to for the types of its first launch."""

    def __init__(self, types: list[Any], options: dict[str, Any]) -> None:
        self.types = types
        self.options = options
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(*arguments: Any) -> None:
            assert not any(isinstance(argument, torch.Tensor) for argument in arguments)
            assert types_of(arguments) == self.types
            self.launches.append((grid, *arguments))

        return run


class Compiled(triton.JITFunction):
    """A kernel that is compiled for every launch which goes the ordinary way."""

    def __init__(self) -> None:
        self.binaries: list[Binary] = []
        names = ("x_ptr", "other_ptr", "size", "number", "CONSTANT")
        self.params = [SimpleNamespace(name=name) for name in names]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **named: Any) -> Binary:
            constants = [named.pop("CONSTANT")] if len(arguments) < len(self.params) else []
            self.binaries.append(Binary(types_of([*arguments, *constants]), named))
            return self.binaries[-1]

        return run


class Interpreted:
    """A kernel under the interpreter, which compiles nothing."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        return lambda *arguments, **options: self.launches.append((grid, arguments, options))


def types_of(arguments: Any) -> list[Any]:
    pointers = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
    return [DTYPES.get(argument, type(argument)) for argument in pointers]


def test_interpreted_launches_all_go_the_ordinary_way() -> None:
    kernel = Interpreted()
    launches = CachedLaunches(kernel)
    for number in range(3):
        launches[(5,)](FLOATS, number, num_warps=1)
    assert kernel.launches == [((5,), (FLOATS, n), {"num_warps": 1}) for n in range(3)]


def test_a_launch_seen_before_goes_to_its_binary() -> None:
    kernel = Compiled()
    launches = CachedLaunches(kernel)
    for other in (FLOATS, OTHERS, FLOATS):
        launches[(7, 2)](FLOATS, other, 32, 7, CONSTANT=4, num_warps=2)
    for _ in range(2):
        launches[(3,)](FLOATS, None, 32, 3, 4, num_warps=2)
    by_name, by_position = kernel.binaries
    assert by_name.options == {"num_warps": 2}
    x, y = FLOATS.data_ptr(), OTHERS.data_ptr()
    assert by_name.launches == [((7, 2, 1), x, other, 32, 7, 4) for other in (y, x)]
    assert by_position.launches == [((3, 1, 1), x, None, 32, 3, 4)]


@pytest.mark.parametrize(
    ("tensors", "sizes"),
    [
        ((HALVES, FLOATS), (32, 3, 4)),
        ((FLOATS[1:], FLOATS), (32, 3, 4)),
        ((FLOATS, None), (32, 3, 4)),
        ((FLOATS, FLOATS), (33, 3, 4)),
        ((FLOATS, FLOATS), (32, 2**31, 4)),
        ((FLOATS, FLOATS), (32, 3, 5)),
    ],
)
def test_triton_chooses_the_binary_of_what_is_new(
    tensors: tuple[torch.Tensor | None, ...], sizes: tuple[int, ...]
) -> None:
    kernel = Compiled()
    launches = CachedLaunches(kernel)
    for _ in range(2):
        launches[(1,)](FLOATS, FLOATS, 32, 3, 4)
        launches[(1,)](*tensors, *sizes)
    assert [len(binary.launches) for binary in kernel.binaries] == [1, 1]


def test_launches_of_ever_new_sizes_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "MOST_LAUNCHES", 3)
    launches = CachedLaunches(Compiled())
    for size in range(8):
        launches[(1,)](FLOATS, FLOATS, size, 3, 4)
    assert len(launches._launches) <= 3


def test_options_select_the_binary() -> None:
    kernel = Compiled()
    launches = CachedLaunches(kernel)
    for warps in (1, 2, 1, 2):
        launches[(1,)](FLOATS, FLOATS, 32, 3, 4, num_warps=warps)
    assert [binary.options for binary in kernel.binaries] == [{"num_warps": 1}, {"num_warps": 2}]


def test_a_compiled_kernel_reaches_no_cpu_tensor() -> None:
    expect_reachable(Interpreted(), "x", FLOATS)
    with pytest.raises(TensorContractError, match=r"x: expected a CUDA tensor .* got one on cpu"):
        expect_reachable(Compiled(), "x", FLOATS)


# --- launches that overlap the kernel before them ---


def test_no_pdl_on_a_cpu() -> None:
    assert pdl_options(torch.device("cpu")) == {"PDL": False}


@pytest.mark.parametrize(
    ("capability", "hip", "early"),
    [((8, 9), None, False), ((9, 0), None, True), ((12, 0), None, True), ((9, 4), "7.0", False)],
    ids=["before", "first", "later", "other-maker"],
)
def test_pdl_goes_by_the_device(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None, early: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    programmatic_launch._supports_pdl.cache_clear()
    options = pdl_options(CUDA)
    programmatic_launch._supports_pdl.cache_clear()
    assert options == ({"PDL": True, "launch_pdl": True} if early else {"PDL": False})


def early_kernels() -> list[Any]:
    """Every kernel of the package that may be launched with PDL."""
    root = Path(mtp_plugin.__file__).parent
    return [
        pytest.param(node, id=f"{path.relative_to(root)}:{node.name}")
        for path in sorted(root.rglob("*.py"))
        if "PDL: tl.constexpr" in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and any(argument.arg == "PDL" for argument in node.args.args)
        and not node.name.startswith("grid_dependency_synchronize")
    ]


READ_AHEAD = {
    "ops/sampling/sample_triton.py:sample_finish_kernel": {
        "table_ptr",
        "slot_ptr",
        "slot_row_ptr",
        "position_ptr",
        "ahead_ptr",
    }
}
"""What a kernel reads past the L1 cache while its primary ends, which does not write it."""
WAITS = ("grid_dependency_synchronize(PDL)", "grid_dependency_synchronize_ahead(PDL)")


def above_wait(kernel: ast.FunctionDef) -> tuple[list[ast.AST], str]:
    """Return the nodes before a kernel's wait, and the wait."""
    lines = [ast.unparse(statement) for statement in kernel.body]
    (wait,) = [number for number, line in enumerate(lines) if line in WAITS]
    return [node for line in kernel.body[:wait] for node in ast.walk(line)], lines[wait]


@pytest.mark.parametrize("kernel", early_kernels())
def test_a_kernel_launched_with_pdl_waits_first(
    kernel: ast.FunctionDef, request: pytest.FixtureRequest
) -> None:
    """Above the wait only weights are touched, which no kernel writes, and nothing is stored."""
    name = request.node.callspec.id
    above, _ = above_wait(kernel)
    names = {node.id for node in above if isinstance(node, ast.Name)}
    allowed = READ_AHEAD.get(name, {"weight_ptr"})
    assert {name for name in names if name.endswith("_ptr")} <= allowed
    called = {node.attr for node in above if isinstance(node, ast.Attribute)}
    assert not any(name == "store" or name.startswith("atomic") for name in called)


def test_reads_ahead_bypass_the_cache_and_follow_the_wait_of_the_primary() -> None:
    kernels = {param.id: param.values[0] for param in early_kernels()}
    primaries = {name for name, kernel in kernels.items() if above_wait(kernel)[1] == WAITS[1]}
    assert primaries == {name.replace("finish", "scan") for name in READ_AHEAD}
    for name, ahead in READ_AHEAD.items():
        primary = kernels[name.replace("finish", "scan")]
        assert not any(isinstance(node, ast.Name) for node in above_wait(primary)[0])
        for node in above_wait(kernels[name])[0]:
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("load_"):
                assert ast.unparse(node.args[-1]) == "'.cg'"
        stores = [
            ast.unparse(node.args[0])
            for node in ast.walk(primary)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.store"
        ]
        assert not any(pointer in store for pointer in ahead for store in stores)
