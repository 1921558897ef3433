"""Which values XLA stores, and which it computes anew inside of every kernel that reads them.

    for kernel in kernels(graph).kernels: ...

A kernel is an op that writes memory, with all that is fused into it: it reads the stored values behind its
op's operands. The rules follow XLA's, as seen in programs that jaxlib 0.10.2 compiled:

- Operands and results of matrix products, collectives and loops are stored, and reductions' results.
- What one kernel reads is fused into it. What several read is computed in each of them on a GPU, unless
  storing it moves fewer bytes; on a CPU only if it is cheap and read twice.
- On a CPU a library reduces rows, or their products; what else they are computed from is stored before.
- `x + scatter(zeros)` is a scatter into x.
- On a GPU an FP8 product reads codes and scales; the widening before it is only a pattern. cuBLASLt wants the
  contracted axis last in both operands: others are transposed into a temporary.
- On a CPU a bfloat16 product is computed in float32 on copies of its operands, and a lhs whose contracted
  axis is not last is transposed into one. Stacks of bfloat16 or float8 that a scan goes over are widened
  before it, as a whole.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fp8jax.memory.graph import Graph, Op, Value

# Bytes below which a value is not worth a thought: the scalars and statistics around the tensors.
SMALL = 4096

# cuBLASLt's, on Hopper and later; products run one at a time.
WORKSPACE = 32 * 2**20

# What XLA on a CPU does not compute twice.
_EXPENSIVE = frozenset(
    "cos div erf erf_inv exp exp2 expm1 log log1p logistic pow rsqrt sin sqrt tan tanh".split()
)

# What the library that reduces rows on a CPU computes along.
_READ_BY_LIBRARY = frozenset(
    "broadcast_in_dim convert_element_type dynamic_slice integer_pow mul square".split()
)


class Kernel(NamedTuple):
    """What runs at once."""

    op: Op
    reads: dict[int, Value]  # stored values, by id
    writes: list[Value]  # stored values
    scratch: int  # bytes that it needs besides
    waits: dict[int, Value]  # stored values that are to be there first: what is behind the same barrier


class Kernels(NamedTuple):
    """A graph's kernels in the order of the program."""

    graph: Graph
    kernels: list[Kernel]
    behind: dict[int, dict[int, Value]]  # of values that are not stored: the stored ones they are made of

    def stored(self, value: Value) -> dict[int, Value]:
        """The value, if it is stored, or those that it is computed from."""
        return self.behind.get(id(value), {id(value): value})


def kernels(graph: Graph) -> Kernels:
    """Fuses a graph; changes it, so it is done once."""
    _see_what_is_multiplied(graph)
    _see_scatters(graph)
    graph.prune()
    stored = _stored(graph)
    behind: dict[int, dict[int, Value]] = {}
    held: dict[int, dict[int, Value]] = {}
    found = Kernels(graph, [], behind)
    for op in graph.ops:
        reads: dict[int, Value] = {}
        waits: dict[int, Value] = {}
        for value in op.reads:
            reads.update(found.stored(value))
            waits.update(held.get(id(value), {}))
        if op.kind == "barrier":
            waits = {**waits, **reads}
        for i, value in enumerate(op.writes):
            if id(value) not in stored:
                behind[id(value)] = found.stored(op.reads[i]) if op.kind == "barrier" else reads
                if waits:
                    held[id(value)] = waits
        writes = [value for value in op.writes if id(value) in stored]
        if writes or op.kind == "store":
            found.kernels.append(Kernel(op, reads, writes, op.params.get("scratch", 0), waits))
    return found


def _stored(graph: Graph) -> set[int]:
    """The ids of the values that kernels store."""
    sources = _sources(graph)
    stored: set[int] = set()
    must = {id(value) for value in graph.outputs}
    # Backwards, so that it is known in which kernels a value ends up.
    ends: dict[int, set[int]] = {}
    for op in reversed(graph.ops):
        for value in op.writes:
            ends[id(value)] = set()
            for reader in value.readers:
                if _wants_stored(reader, value, must, graph.platform):
                    must.add(id(value))
                elif reader.kind in ("reduce", "store", "update"):
                    ends[id(value)].add(id(reader))
                else:
                    for new in reader.writes:
                        ends[id(value)] |= {id(new)} if id(new) in stored else ends[id(new)]
            if op.kind in ("barrier", "view"):
                if op.kind == "barrier" or id(value) in must:
                    must.update(map(id, op.reads))
            elif op.kind != "fusible" or id(value) in must:
                stored.add(id(value))
            elif _is_better_stored(graph, value, sources[id(value)], len(ends[id(value)])):
                stored.add(id(value))
    return stored


def _wants_stored(reader: Op, value: Value, must: set[int], platform: str) -> bool:
    if reader.kind == "update":
        return reader.reads[0] is value
    if reader.kind == "view":
        return id(reader.writes[0]) in must
    if reader.kind == "reduce" and platform == "cpu" and value.op is not None:
        is_row = len(value.shape) - 1 in reader.params.get("axes", reader.params.get("dimensions", ()))
        return is_row and value.op.kind == "fusible" and value.op.name not in _READ_BY_LIBRARY
    return reader.kind in ("barrier", "loop", "opaque")


def _sources(graph: Graph) -> dict[int, dict[int, Value]]:
    """What each fusible value would read if all behind it were computed anew. Slices count as they are."""
    sources: dict[int, dict[int, Value]] = {}
    for op in graph.ops:
        if op.kind not in ("fusible", "view"):
            continue
        behind: dict[int, Value] = {}
        for value in op.reads:
            behind.update(sources.get(id(value), {id(value): value}))
        for value in op.writes:
            is_slice = op.name in ("dynamic_slice", "gather", "slice")
            sources[id(value)] = {id(value): value} if is_slice else behind
    return sources


def _is_better_stored(graph: Graph, value: Value, sources: dict[int, Value], readers: int) -> bool:
    """Whether a value that several kernels read is stored by the first."""
    if readers < 2 or value.bytes <= SMALL:
        return False
    read = sum(source.bytes for source in sources.values() if source.bytes > SMALL)
    if graph.platform == "cpu":
        assert value.op is not None
        if value.op.name == "dynamic_slice":
            return False  # to read it again costs no more
        is_expensive = value.op.name in _EXPENSIVE or value.dtype == jnp.bfloat16  # rounded in software
        return is_expensive or readers > 2
    return read + value.bytes + readers * value.bytes < readers * read


# Matrix products #################################################################################


def _see_what_is_multiplied(graph: Graph) -> None:
    """Gives products and scans the operands that they really read, and what products need besides."""
    ops, graph.ops = graph.ops, []
    for op in ops:
        if op.name == "dot_general":
            ((axes, _), _) = op.params["dimension_numbers"], None
            contracted = [
                axis[0] if axis else len(v.shape) - 1 for axis, v in zip(axes, op.reads, strict=True)
            ]
            (_on_cpu if graph.platform == "cpu" else _on_gpu)(graph, op, contracted)
        elif op.name == "scan" and graph.platform == "cpu":
            first = op.params["num_consts"] + op.params["num_carry"]
            for i, stack in enumerate(op.reads[first:], first):
                if stack.dtype == jnp.bfloat16 or stack.is_float8:
                    op.reads[i] = _widened(graph, stack, jnp.float16 if stack.is_float8 else jnp.float32)
        graph.ops.append(op)


def _on_gpu(graph: Graph, op: Op, contracted: list[int]) -> None:
    op.params["scratch"] = WORKSPACE
    codes = [_codes_behind(value) for value in op.reads]
    if all(value.is_float8 for value in codes):
        op.reads = codes
        turned = (v.bytes for v, axis in zip(codes, contracted, strict=True) if axis != len(v.shape) - 1)
        op.params["scratch"] += sum(turned)
    op.reads = [_untransposed(value) for value in op.reads]


def _on_cpu(graph: Graph, op: Op, contracted: list[int]) -> None:
    op.reads = [_untransposed(value) for value in op.reads]
    [out], lhs = op.writes, op.reads[0]
    is_turned = contracted[0] != len(lhs.shape) - 1
    if out.dtype == jnp.bfloat16:
        op.reads = [_widened(graph, value, jnp.float32) for value in op.reads]
        out.bytes = out.cost = 2 * out.bytes
    op.params["scratch"] = op.reads[0].bytes if is_turned else 0


def _widened(graph: Graph, value: Value, dtype: Any) -> Value:
    aval = jax.ShapeDtypeStruct(value.shape, jnp.dtype(dtype))
    return graph.add("convert_element_type", "fusible", [value], [aval], {}).writes[0]


def _untransposed(value: Value) -> Value:
    """A matrix behind its transpose: a product takes either."""
    while value.op is not None and value.op.name == "transpose" and len(value.shape) == 2:
        value = value.op.reads[0]
    return value


def _codes_behind(value: Value) -> Value:
    """The FP8 codes that an operand is widened and scaled from, or the operand."""
    return next((behind for behind in _behind(value) if behind.is_float8), value)


def _behind(value: Value) -> Iterator[Value]:
    """What a value was before it was widened, scaled and turned."""
    while value.op is not None:
        op = value.op
        if op.name == "mul":
            arrays = [operand for operand in op.reads if not _is_one_number(operand)]
            if len(arrays) != 1:
                return
            [value] = arrays
        elif op.kind == "view" or op.name in ("convert_element_type", "transpose"):
            value = op.reads[0]
        else:
            return
        yield value


def _is_one_number(value: Value) -> bool:
    """Whether all elements are the same scalar."""
    while math.prod(value.shape) > 1:
        op = value.op
        if op is None or (op.kind != "view" and op.name not in ("broadcast_in_dim", "convert_element_type")):
            return False
        if not op.reads:
            return False
        value = op.reads[0]
    return True


def _see_scatters(graph: Graph) -> None:
    place = {id(op): number for number, op in enumerate(graph.ops)}
    for op in graph.ops:
        if op.name not in ("add", "add_any"):
            continue
        for value, other in (op.reads, op.reads[::-1]):
            scatter = value.op
            if scatter is None or scatter.kind != "update" or len(value.readers) != 1:
                continue
            comes_before = other.op is None or place[id(other.op)] < place[id(scatter)]
            if comes_before and _is_one_number(scatter.reads[0]) and other.bytes == value.bytes:
                scatter.reads[0], op.reads, op.kind = other, [value], "view"
                break
