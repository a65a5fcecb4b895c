"""Triton's interpreter as it is, in a fraction of the time.

It computes with numpy, and spends its time on the bookkeeping around it: at every call of a jit
function it sorts all members of ``triton.language`` to find those that it replaces, also
where they are in place; every value gets its type, shape and number of elements made anew; operands
are promoted and spread in many steps though numpy does it by itself; and every sum of integers is
computed once more to see whether it overflows, which is only reported in debug mode.

`remembered` holds what is found out once, `arithmetic` what numpy does at once.
"""

from __future__ import annotations

import dataclasses


def speed_up() -> None:
    """Let the interpreter remember all that, and leave the second sum out."""
    from triton.runtime import interpreter

    from tests.interpreter import arithmetic, remembered

    builder, semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    remembered.remember_numpy_types()
    remembered.remember_shapes()
    remembered.know_by_identity()
    if hasattr(interpreter, "_LangPatchScope"):  # before Triton 3.6 replacements are made otherwise
        remembered.remember_constants(semantic)
        remembered.pass_equal_operands(semantic)
        arithmetic.compute_at_once(semantic)
        remembered.remember_replacements(arithmetic.operators(semantic))
