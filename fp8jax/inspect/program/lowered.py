"""The GEMMs of a program before XLA optimizes it, and its equations before it is lowered.

A CPU computes FP8 GEMMs in a wider format, exactly, so its compiled program does not show them.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core as jex

from fp8jax.inspect.program.gemms import Gemm, gemm_of
from fp8jax.inspect.program.hlo import Instruction, parse
from fp8jax.quantization.packed import DECODED

# An array keeps its values through these, but for a scale.
_VALUE_PRESERVING = frozenset("bitcast-convert convert copy multiply opt-barrier reshape transpose".split())


def equations(jaxpr: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """The equations of a jaxpr and of the jaxprs in them, in their order; those of a shared jaxpr once."""
    seen = set() if seen is None else seen
    if id(jaxpr) not in seen:
        seen.add(id(jaxpr))
        for equation in jaxpr.eqns:
            yield equation
            for inner in jex.jaxprs_in_params(equation.params):
                yield from equations(inner, seen)


def read_lowered(lowered: jax.stages.Lowered) -> tuple[Gemm, ...]:
    """The GEMMs of a lowered program.

    Args:
        lowered: the result of `jax.jit(f).lower(...)`.

    Returns:
        As `CompiledProgram.gemms`, with two differences. An operand's dtype is the narrowest on the way from
        the operation that computed it: E4M3 codes that were widened and scaled are "f8e4m3fn". Trip counts
        are not known yet, so `runs` is 1.
    """
    hlo = lowered.compiler_ir(dialect="hlo")
    assert hlo is not None
    module, gemms = parse(hlo.get_hlo_module().to_string()), []
    for dot, _, scope in module.executed():
        if dot.opcode == "dot" and (gemm := gemm_of(module, dot)):
            lhs, rhs = map(_narrowest, dot.operands)
            blocks = tuple(filter(None, map(_block, dot.operands)))
            gemms.append(gemm._replace(lhs=lhs, rhs=rhs, name=scope + gemm.name, blocks=blocks))
    return tuple(gemms)


def _narrowest(operand: Instruction | None) -> str:
    """The narrowest floating dtype of an operand on the way from the operation that computed it."""
    floats = []
    while operand is not None:
        if f"/{DECODED}/" in operand.op_name:
            return "f4e2m1fn"
        if operand.first.dtype[:1] in ("f", "b"):
            floats.append(operand.first)
        operand = _before(operand)
    return min(floats, key=lambda array: array.bits).dtype if floats else ""


def _block(operand: Instruction) -> str:
    """The block and the dtype of an operand's scales, as "1x128 f32"; "" without scales of blocks."""
    at: Instruction | None = operand
    while at is not None and at.opcode != "multiply":
        at = _before(at)
    if at is None:
        return ""
    scale = at.operands[1]
    while scale.opcode in ("broadcast", "reshape"):
        scale = scale.operands[0]
    of_batch = operand.first.dims[:-2]
    if not scale.first.dims or (of_batch and math.prod(scale.first.dims) == math.prod(of_batch)):
        return ""  # one for each matrix
    sizes = zip(operand.first.dims[-2:], scale.first.dims[-2:], strict=False)
    return f"{'x'.join(str(dim // blocks) for dim, blocks in sizes)} {_narrowest(scale)}"


def _before(operand: Instruction) -> Instruction | None:
    """The instruction with the same values, but for a scale; None for the operation that computed them."""
    if operand.opcode == "get-tuple-element":  # one array of a barrier
        [barrier] = operand.operands
        if barrier.opcode == "opt-barrier" and barrier.operands[0].opcode == "tuple":
            return barrier.operands[0].operands[int(operand.find(r"index=(\d+)"))]
    return operand.operands[0] if operand.opcode in _VALUE_PRESERVING else None
