"""Triton's interpreter as it is, in half of the time.

At every call of a jit function it sorts all members of ``triton.language`` to find those that it
stands in for; for the type of every value it makes a table of all types; and every sum of integers
is computed once more to see whether it overflows, of which nobody is told outside debug mode.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any


def speed_up() -> None:
    """Let the interpreter remember the first two, and leave the third out."""
    from triton import language
    from triton.language import core
    from triton.runtime import interpreter

    packages = language, core, language.math, core.tensor, core.tensor_descriptor_base
    builtins = {
        package: [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]
        for package in packages
    }
    numpy_type = interpreter._get_np_dtype
    of_scalar = functools.cache(numpy_type)

    def patch_builtin(package: Any, *others: Any) -> None:
        for name in builtins[package]:
            member = getattr(package, name)
            if core.is_builtin(member):  # not where the stand-in is in place
                interpreter._patch_attr(package, name, member, *others)

    def get_np_dtype(told: Any) -> Any:
        scalar = told.scalar
        return numpy_type(told) if scalar.is_ptr() else of_scalar(scalar)

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_builtin = patch_builtin
    interpreter._get_np_dtype = get_np_dtype
