"""What the interpreter finds out again at every call, found out once."""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

from triton import language
from triton.language import core
from triton.runtime import interpreter


def remember_numpy_types() -> None:
    numpy_type = interpreter._get_np_dtype
    of_scalar = functools.cache(numpy_type)

    def get_np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        return numpy_type(dtype) if scalar.is_ptr() else of_scalar(scalar)

    interpreter._get_np_dtype = get_np_dtype


def remember_replacements(operators: dict[str, Any]) -> None:
    """Look for the members to replace once, and replace them once per launch.

    ``operators`` replace those of values.
    """
    packages = language, core, language.math, core.tensor, core.tensor_descriptor_base
    builtins = {
        package: [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]
        for package in packages
    }

    checks_the_call = core.to_tensor.__code__
    semantic = interpreter.interpreter_semantic

    @functools.cache
    def replacement_of(member: Any) -> Any:
        code = getattr(member, "__code__", None)  # Triton 3.8 has classes among them
        function = member.__wrapped__ if code is checks_the_call else member

        def replacement(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*args, **named)

        return replacement

    def patch_builtin(package: Any, _: Any, scope: Any) -> None:
        for name in builtins[package]:
            member = getattr(package, name)
            if core.is_builtin(member):  # not where the replacement is in place
                of_value = operators.get(name) if package is core.tensor else None
                scope.set_attr(package, name, of_value or replacement_of(member))

    patch, nothing = interpreter._patch_lang, interpreter._LangPatchScope()
    in_place: set[str] = set()

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            in_place.clear()
            super().restore()

    @functools.cache
    def seen_by(function: Any) -> frozenset[str]:
        values = function.__globals__.values()
        return frozenset(
            package.__name__
            for package in (language, core)
            if any(value is package for value in values)
        )

    def patch_lang(function: Any) -> Any:
        seen = seen_by(function)
        if seen and seen <= in_place:
            return nothing
        scope = patch(function)
        in_place.update(seen)
        return scope

    interpreter._patch_builtin = patch_builtin
    interpreter._LangPatchScope = Scope
    interpreter._patch_lang = patch_lang


def remember_shapes() -> None:
    """Types of blocks, and values, of one shape share all that follows from the shape."""
    make_type = core.block_type.__init__
    sequences = list, core.tuple
    of_types: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    of_values: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def of_value(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        numel = core.constexpr(math.prod(sizes))
        return core.tuple([core.constexpr(size) for size in sizes]), numel

    scalar = of_value(())

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        if type(shape) not in sequences:
            return make_type(self, element_ty, shape)
        sizes = tuple([size.value if type(size) is core.constexpr else size for size in shape])
        known = of_types.get(sizes)
        if known is None:
            make_type(self, element_ty, shape)
            of_types[sizes] = self.shape, self.numel, str(self.shape)
            of_values[sizes] = of_value(sizes)
            return None
        self.element_ty = element_ty
        self.shape, self.numel, spelled = known
        self.name = f"<{spelled}, {element_ty}>"
        return None

    def init_value(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_values[tuple(type.shape.values)] if type.is_block() else scalar

    core.block_type.__init__ = init_type
    core.tensor.__init__ = init_value


def remember_constants(semantic: Any) -> None:
    """Numbers of a type are made once; nothing writes into a value."""
    make = semantic.scalar_constant
    kept: dict[tuple[Any, ...], Any] = {}

    @functools.wraps(make)
    def scalar_constant(value: Any, dtype: Any) -> Any:
        kind = type(value)
        if dtype is None or (kind is not int and kind is not float):
            return make(value, dtype)
        key = kind, value, dtype.name
        constant = kept.get(key)
        if constant is None:
            if len(kept) > 10_000:
                kept.clear()
            constant = kept[key] = make(value, dtype)
        return constant

    semantic.scalar_constant = scalar_constant


def pass_equal_operands(semantic: Any) -> None:
    """Operands of one type and shape, and small numbers, are neither promoted nor broadcast."""
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    integers = "int32", "int64"

    def takes(dtype: str, number: Any) -> bool:
        """Whether a number takes that type as the other operand."""
        kind = type(number)
        if kind is float:
            return dtype == "fp32"
        return kind is int and (dtype in integers or dtype == "fp32") and -(2**31) <= number < 2**31

    @functools.wraps(broadcast)
    def broadcast_impl_value(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(lhs, rhs)

    @functools.wraps(check)
    def check_types(
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        if arithmetic_check:
            if type(lhs) is core.tensor:
                dtype = lhs.dtype
                if type(rhs) is core.tensor:
                    if rhs.dtype is dtype and (dtype.name in integers or dtype.name == "fp32"):
                        return broadcast_impl_value(lhs, rhs)
                elif takes(dtype.name, rhs):
                    return broadcast_impl_value(lhs, semantic.scalar_constant(rhs, dtype))
            elif type(rhs) is core.tensor and takes(rhs.dtype.name, lhs):
                return broadcast_impl_value(semantic.scalar_constant(lhs, rhs.dtype), rhs)
        return check(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    semantic.broadcast_impl_value = broadcast_impl_value
    semantic.binary_op_type_checking_impl = check_types


def know_by_identity() -> None:
    """Types that are one object are equal, and what is no constant of a kernel is not unwrapped."""
    unwrap, equal = core._unwrap_if_constexpr, core.dtype.__eq__
    as_they_are = core.tensor, int, float, bool

    @functools.wraps(unwrap)
    def unwrap_if_constexpr(value: Any) -> Any:
        kind = type(value)
        if kind in as_they_are:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    @functools.wraps(equal)
    def same_type(self: Any, other: Any) -> Any:
        return True if self is other else equal(self, other)

    core._unwrap_if_constexpr = unwrap_if_constexpr
    core.dtype.__eq__ = same_type
