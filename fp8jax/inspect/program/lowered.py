"""The GEMMs of a program before XLA optimizes it.

A CPU computes FP8 GEMMs in a wider format, exactly, so its compiled program does not show them.
"""

from collections.abc import Iterator

import jax

from fp8jax.inspect.program.compiled import Gemm, gemm_of
from fp8jax.inspect.program.hlo import Computation, Module, bits_of, first_of, parse

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
    module = parse(hlo.get_hlo_module().to_string())
    return tuple(_dots(module, module.entry, ""))


def _dots(module: Module, name: str, outer: str) -> Iterator[Gemm]:
    """The dots of a computation, once for each place that calls it. Inside a called function names begin
    anew: `outer` is the name of the call."""
    body = module.computations[name]
    for instruction in body.values():
        if instruction.opcode == "dot":
            gemm = gemm_of(module, "dot", instruction, body)
            lhs, rhs = (_narrowest(body, operand) for operand in instruction.operands)
            yield gemm._replace(lhs=lhs, rhs=rhs, name=f"{outer}{gemm.name}")
        inner = f"{outer}{instruction.op_name}/" if instruction.opcode == "call" else outer
        for called in instruction.called:
            yield from _dots(module, called, inner)


def _narrowest(body: Computation, name: str) -> str:
    """The narrowest floating dtype of an operand on the way from the operation that computed it."""
    dtypes = []
    while name in body:
        instruction = body[name]
        if instruction.opcode == "get-tuple-element":  # one array of a barrier
            barrier = body[instruction.operands[0]]
            arrays = body.get(barrier.operands[0]) if barrier.opcode == "opt-barrier" else None
            if arrays is None or arrays.opcode != "tuple":
                break
            name = arrays.operands[int(instruction.find(r"index=(\d+)"))]
            continue
        dtypes.append(first_of(instruction.shape)[0])
        if instruction.opcode not in _VALUE_PRESERVING:
            break
        name = instruction.operands[0]
    return min((dtype for dtype in dtypes if dtype[0] in "fb"), key=bits_of, default="")
