"""A traced function as one graph of what XLA would see: calls inlined, loops with bodies, nothing unused.

    graph = of_jaxpr(jax.make_jaxpr(step)(*shapes), "gpu")
    [op.name for op in graph.ops]

Values are arrays. An op reads values and writes new ones. Its kind says what XLA can do with it:

| kind | what it is |
|---|---|
| `fusible` | computed element by element, inside of the kernel that reads it |
| `view` | the same bytes in another shape |
| `reduce` | reads element by element what it is given, stores a smaller array |
| `update` | a slice or scattered numbers written into its first operand, in place where that dies |
| `barrier` | views that must be stored |
| `loop` | `scan`, `while` or `cond`, with graphs for bodies |
| `store` | a scan's body writes its slice of a stacked output |
| `opaque` | a matrix product, a collective, a sort: all that it reads and writes is stored |
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

_CALLS = frozenset(
    "checkpoint closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr jit pjit remat "
    "remat2".split()
)
_KINDS = {
    **dict.fromkeys(
        "reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum".split(), "reduce"
    ),
    **dict.fromkeys(("argmax", "argmin"), "reduce"),
    **dict.fromkeys(
        "along copy differentiable_once expand_dims from_edtype name pcast pvary reshape reshard "
        "sharding_constraint squeeze stop_gradient to_edtype".split(),
        "view",
    ),
    **dict.fromkeys(("dynamic_update_slice", "scatter", "scatter-add", "scatter_add"), "update"),
    **dict.fromkeys(("cond", "scan", "while"), "loop"),
    **dict.fromkeys(
        "all_gather all_to_all approx_top_k conv_general_dilated cumlogsumexp cummax cummin cumprod cumsum "
        "custom_call dot_general fft ffi_call pmax pmin ppermute psum psum_scatter ragged_dot_general "
        "random_bits reduce_scatter rng_bit_generator sort threefry2x32 top_k".split(),
        "opaque",
    ),
    "optimization_barrier": "barrier",
}


class Value:
    """An array.

    Attributes:
        shape, dtype: its own.
        bytes: its size on one device.
        cost: what it adds to memory: 0 where its bytes are counted elsewhere.
        op: what writes it; None for an input.
        parts: among how many devices it is split.
        readers: ops that read it, without repetition.
    """

    __slots__ = ("bytes", "cost", "dtype", "op", "parts", "readers", "shape")

    def __init__(self, aval: Any, op: "Op | None" = None, cost: int | None = None) -> None:
        self.shape, self.dtype, self.op = tuple(aval.shape), aval.dtype, op
        self.bytes = size_of(aval)
        self.cost = self.bytes if cost is None else cost
        self.parts = 1
        self.readers: list[Op] = []

    def divide(self, parts: int) -> None:
        """Makes it an array of which a device has one of so many parts."""
        self.parts *= parts
        self.bytes //= parts
        self.cost //= parts

    @property
    def is_float8(self) -> bool:
        """Whether it holds FP8 codes, as floats."""
        return str(self.dtype).startswith("float8")


class Op:
    """One operation.

    Attributes:
        name: its primitive's.
        kind: see this module.
        reads, writes: values.
        params: its primitive's.
        bodies: of a loop: what it runs, one graph for each branch of a `cond`.
    """

    __slots__ = ("bodies", "kind", "name", "params", "reads", "writes")

    def __init__(
        self, name: str, kind: str, reads: Sequence[Value], avals: Sequence[Any], params: Any
    ) -> None:
        self.name, self.kind, self.params = name, kind, params
        self.reads, self.writes = list(reads), [Value(aval, self) for aval in avals]
        self.bodies: list[Graph] = []
        if kind in ("fusible", "view") and name != "part":
            # Outside of what each device does, arrays are as split as what they are made of.
            parts = max((value.parts for value in reads), default=1)
            for value in self.writes:
                value.divide(parts)


class Graph:
    """Ops in the order of the program, between inputs and outputs."""

    def __init__(self, platform: str) -> None:
        self.platform = platform
        self.ops: list[Op] = []
        self.inputs: list[Value] = []
        self.fixed: list[Value] = []  # inputs that nothing may write into
        self.outputs: list[Value] = []
        self.fused: Any = None  # its kernels, once known
        self.marks: dict[str, list[Value]] = {}  # what the calls to be remembered returned

    def add(self, name: str, kind: str, reads: Sequence[Value], avals: Sequence[Any], params: Any) -> Op:
        """A new op at the end."""
        op = Op(name, kind, reads, avals, params)
        self.ops.append(op)
        return op

    def inline(self, jaxpr: Any, inputs: Sequence[Value]) -> list[Value]:
        """Adds a jaxpr's equations; returns its outputs."""
        values: dict[Any, Value] = {}
        if hasattr(jaxpr, "consts"):
            constants = [jax.typeof(constant) for constant in jaxpr.consts]
            jaxpr = jaxpr.jaxpr
            values.update(zip(jaxpr.constvars, map(Value, constants), strict=True))
        values.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Value:
            return Value(atom.aval) if hasattr(atom, "val") else values[atom]

        for eqn in jaxpr.eqns:
            reads = [read(atom) for atom in eqn.invars]
            if eqn.primitive.name == "shard_map":
                writes = self._on_each(eqn, reads)
            elif (inner := self._called(eqn)) is not None:
                writes = self.inline(inner, self._held_back(eqn, reads))
                self.marks[eqn.params.get("name", "")] = writes
            else:
                kind, avals = _kind(eqn), [var.aval for var in eqn.outvars]
                reads = reads[:1] if kind == "view" else reads  # others only tell JAX something
                writes = self.add(eqn.primitive.name, kind, reads, avals, dict(eqn.params)).writes
            values.update(zip(eqn.outvars, writes, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _on_each(self, eqn: Any, reads: Sequence[Value]) -> list[Value]:
        """Inlines what each device does of its parts of arrays."""
        inner = eqn.params["jaxpr"]
        avals = [var.aval for var in getattr(inner, "jaxpr", inner).invars]
        parts = [
            self.add("part", "view", [v], [aval], {}).writes[0] for v, aval in zip(reads, avals, strict=True)
        ]
        writes = []
        specs = eqn.params["out_specs"]
        for value, var, spec in zip(self.inline(inner, parts), eqn.outvars, specs, strict=True):
            [new] = self.add("whole", "view", [value], [var.aval], {}).writes
            new.divide(parts_of(spec, eqn.params["mesh"]))
            writes.append(new)
        return writes

    def _held_back(self, eqn: Any, reads: list[Value]) -> list[Value]:
        """What a call reads; in a backward, a checkpointed one not before all of it is there."""
        prevents = eqn.params.get("prevent_cse", False)
        if not eqn.params.get("differentiated") or self.platform == "cpu":  # which drops barriers
            return reads
        prevents = prevents if isinstance(prevents, tuple) else (prevents,) * len(reads)
        held = [value for value, is_held in zip(reads, prevents, strict=True) if is_held]
        if held:
            barrier = self.add("optimization_barrier", "barrier", held, held, {})
            after = iter(barrier.writes)
            reads = [next(after) if is_held else v for v, is_held in zip(reads, prevents, strict=True)]
        return reads

    def _called(self, eqn: Any) -> Any:
        """The jaxpr that an equation stands for, if it is a call."""
        if eqn.primitive.name == "by_platform":
            return eqn.params["cpu" if self.platform == "cpu" else "default"]
        if eqn.primitive.name not in _CALLS:
            return None
        return next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params)

    def prune(self) -> None:
        """Drops what no output needs, in loops' bodies too, and links values to their readers."""
        needed, kept = {id(value) for value in self.outputs}, []
        for op in reversed(self.ops):
            if op.kind == "store" or any(id(value) in needed for value in op.writes):
                if op.kind == "loop" and not op.bodies:
                    _open(op, needed, self.platform)
                kept.append(op)
                needed.update(map(id, op.reads))
        self.ops = kept[::-1]
        for op in self.ops:
            for value in (*op.reads, *op.writes):
                value.readers = []
        for op in self.ops:
            for value in dict.fromkeys(op.reads):
                value.readers.append(op)


def of_jaxpr(closed: Any, platform: str) -> Graph:
    """The graph of a closed jaxpr, as "cpu" or "gpu" would run it; inputs cost nothing."""
    graph = Graph(platform)
    graph.inputs = [Value(var.aval, cost=0) for var in closed.jaxpr.invars]
    graph.outputs = graph.inline(closed, graph.inputs)
    graph.prune()
    return graph


def size_of(aval: Any) -> int:
    """Bytes of an array."""
    dtype = aval.dtype
    if isinstance(dtype, np.dtype):
        return math.prod(aval.shape) * dtype.itemsize
    # An extended dtype: scaling states are float32 beneath, FP8 codes bytes; random keys are small.
    return math.prod(aval.shape) * (1 if "uint8" in repr(getattr(dtype, "float_dtype", "")) else 4)


def _kind(eqn: Any) -> str:
    name, before = eqn.primitive.name, [atom.aval for atom in eqn.invars]
    if name in _KINDS:
        return _KINDS[name]
    after: Any = eqn.outvars[0].aval if eqn.outvars else None
    is_view = {
        "convert_element_type": lambda: before[0].dtype == after.dtype,
        "bitcast_convert_type": lambda: size_of(before[0]) == size_of(after),
        "broadcast_in_dim": lambda: before and size_of(before[0]) == size_of(after),
        "transpose": lambda: _moves_nothing(before[0].shape, eqn.params["permutation"]),
    }
    return "view" if name in is_view and is_view[name]() else "fusible"


def _moves_nothing(shape: tuple[int, ...], permutation: Sequence[int]) -> bool:
    """Whether a transpose only moves axes of size 1."""
    moved = [axis for axis in permutation if shape[axis] > 1]
    return moved == sorted(moved)


def parts_of(spec: Any, mesh: Any) -> int:
    """Among how many devices of a mesh a `PartitionSpec` splits an array."""
    names = [name for entry in spec if entry for name in (entry if isinstance(entry, tuple) else (entry,))]
    return math.prod(mesh.shape[name] for name in names)


# Loops ###########################################################################################


def _open(op: Op, needed: set[int], platform: str) -> None:
    """Gives a loop its bodies, without what is not used of them."""
    params = op.params
    if op.name == "scan":
        op.bodies, first = [_scanned(op, needed, platform)], 0
    elif op.name == "while":
        body = Graph(platform)
        first = params["cond_nconsts"]
        constants = params["body_nconsts"]
        body.inputs = [
            Value(value, cost=0 if i < constants else None) for i, value in enumerate(op.reads[first:])
        ]
        body.outputs = body.inline(params["body_jaxpr"], body.inputs)
        body.fixed = body.inputs[:constants]
        op.bodies = [body]
    else:
        first = 1
        for branch in params["branches"]:
            body = Graph(platform)
            body.inputs = [Value(value, cost=0) for value in op.reads[first:]]
            body.outputs = body.inline(branch, body.inputs)
            op.bodies.append(body)
    used: set[int] = set()
    for body in op.bodies:
        body.prune()
        used |= {i for i, value in enumerate(body.inputs) if value.readers or value in body.outputs}
    for i in range(first, len(op.reads)):
        if i - first not in used:
            op.reads[i] = Value(jax.ShapeDtypeStruct((), np.dtype(np.int32)), cost=0)


def _scanned(op: Op, needed: set[int], platform: str) -> Graph:
    """The body of a scan: it reads slices of what it goes over, and stores slices of what is stacked."""
    constants, carried = op.params["num_consts"], op.params["num_carry"]
    body = Graph(platform)
    body.inputs = [
        Value(value, cost=None if constants <= i < constants + carried else 0)
        for i, value in enumerate(op.reads)
    ]
    body.fixed = body.inputs[:constants] + body.inputs[constants + carried :]
    inside = body.inputs[: constants + carried]
    for stack in body.inputs[constants + carried :]:
        aval = jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype)
        inside += body.add("dynamic_slice", "fusible", [stack], [aval], {}).writes
    outputs = body.inline(op.params["jaxpr"], inside)
    body.outputs = outputs[:carried]
    for value, stack in zip(outputs[carried:], op.writes[carried:], strict=True):
        if id(stack) in needed:
            body.add("store", "store", [value], [], {})
    return body
