"""The GEMMs of a program before XLA optimizes it.

A CPU computes FP8 GEMMs in a wider format, exactly, so its compiled program does not show them.
"""

import jax

from fp8jax.inspect.program.compiled import Gemm, gemm_of
from fp8jax.inspect.program.hlo import Computation, parse

# An array keeps its values through these, but for a scale.
_VALUE_PRESERVING = frozenset("bitcast-convert convert copy multiply opt-barrier reshape transpose".split())


def read_lowered(lowered: jax.stages.Lowered) -> tuple[Gemm, ...]:
    """The GEMMs of a lowered program.

    Args:
        lowered: the result of `jax.jit(f).lower(...)`.

    Returns:
        As `Program.gemms`, with two differences. An operand's dtype is the narrowest on the way from the
        operation that computed it: E4M3 codes that were widened and scaled are "f8e4m3fn". Trip counts are
        not known yet, so `runs` is 1.
    """
    hlo = lowered.compiler_ir(dialect="hlo")
    assert hlo is not None
    module, gemms = parse(hlo.get_hlo_module().to_string()), []
    for executed in module.executed():
        dot, body, _, scope = executed
        if dot.opcode == "dot" and (gemm := gemm_of(module, executed)):
            lhs, rhs = (_narrowest(body, operand) for operand in dot.operands)
            gemms.append(gemm._replace(lhs=lhs, rhs=rhs, name=scope + gemm.name))
    return tuple(gemms)


def _narrowest(body: Computation, name: str) -> str:
    """The narrowest floating dtype of an operand on the way from the operation that computed it."""
    arrays = []
    while name in body:
        instruction = body[name]
        if instruction.opcode == "get-tuple-element":  # one array of a barrier
            barrier = body[instruction.operands[0]]
            barred = body.get(barrier.operands[0]) if barrier.opcode == "opt-barrier" else None
            if barred is None or barred.opcode != "tuple":
                break
            name = barred.operands[int(instruction.find(r"index=(\d+)"))]
            continue
        arrays.append(instruction.first)
        if instruction.opcode not in _VALUE_PRESERVING:
            break
        name = instruction.operands[0]
    floats = [array for array in arrays if array.dtype[0] in "fb"]
    return min(floats, key=lambda array: array.bits).dtype if floats else ""
