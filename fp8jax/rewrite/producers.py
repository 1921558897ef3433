"""The elementwise operations that make a dot's input, found in a jaxpr.

    found = producers(jaxpr, {number: 0})     # of the equation with this number, whose operand 0 is the input

The kernel that quantizes the input can compute these operations itself, see `Computed`. They are followed
back from the input to arrays that are stored anyway: arguments, outputs of dots, sums that have other uses.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from fp8jax.quantization import COLUMNS, ENTRIES, ROWS, Computed, Expression, Operation
from fp8jax.rewrite.interpreter.dots import DOTS

# Operations that the kernel has, in Triton, too.
_ELEMENTWISE = (
    lax.add_p, lax.sub_p, lax.mul_p, lax.div_p, lax.max_p, lax.min_p, lax.neg_p, lax.abs_p, lax.exp_p,
    lax.log_p, lax.log1p_p, lax.tanh_p, lax.rsqrt_p, lax.sqrt_p, lax.square_p,
    lax.integer_pow_p,
)  # fmt: skip
_MOVES = ("convert_element_type", "broadcast_in_dim", "reshape", "copy")
_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call")
# What stores its outputs. XLA would store an operand of the kernel that is a slice or a transpose.
_STORED = (*DOTS, "name", "conv_general_dilated", "scan", "while", "cond", "pallas_call", "ffi_call")
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)

# Of an expression. An input of `ROWS` adds 33 loads to the kernel, and 2 to 3 s to its compile time.
MOST_INPUTS, MOST_ROWS, MOST_OPERATIONS = 8, 1, 32


class Producer(NamedTuple):
    """How an equation's operand is computed."""

    expression: Expression
    inputs: tuple[Any, ...]  # variables of the jaxpr
    shapes: tuple[tuple[int, ...], ...]  # of the inputs, with 1 for the dims that they are broadcast along
    leading: tuple[int, ...]  # all dims of the operand but the last one

    def of(self, matrix: Any, values: Any) -> Computed:
        """The operand's `matrix`, with the values of the inputs."""
        inputs = []
        for place, shape, x in zip(self.expression.inputs, self.shapes, values, strict=True):
            x = x.reshape(shape)
            if place == ROWS:
                x = jnp.broadcast_to(x, (*self.leading, 1))
            inputs.append(x.reshape({ENTRIES: matrix.shape, ROWS: (-1, 1), COLUMNS: (1, -1)}[place]))
        return Computed(matrix, self.expression, tuple(inputs))


def producers(jaxpr: jex.Jaxpr, operands: Mapping[int, int]) -> dict[int, Producer]:
    """For numbers of equations, each with an operand, how it is computed; without an entry if it is not."""
    inputs = {number: jaxpr.eqns[number].invars[operand] for number, operand in operands.items()}
    inputs = {number: var for number, var in inputs.items() if isinstance(var, jex.Var)}
    equations = _inlined(jaxpr, {})
    made = {out: eqn for eqn in equations for out in eqn.outs}
    uses = Counter(x for eqn in equations for x in eqn.ins if not isinstance(x, jex.Literal))
    uses.update(var for var in jaxpr.outvars if isinstance(var, jex.Var))
    by_dots, found = Counter(inputs.values()), {}
    for number, var in inputs.items():
        producer = _ProducerFinder(made, uses, var.aval).producer(var)
        if producer is not None and (uses[var] == by_dots[var] or _bytes(producer.inputs) <= _bytes([var])):
            found[number] = producer
    return found


def _bytes(variables: Any) -> int:
    """The bytes of an entry of the matrix."""
    size = max(math.prod(var.aval.shape) for var in variables)
    return sum(var.aval.dtype.itemsize for var in variables if math.prod(var.aval.shape) == size)


class _Inner(NamedTuple):
    """A variable inside of a call."""

    call: tuple[int, ...]
    var: Any

    @property
    def aval(self) -> Any:
        """Its shape and dtype."""
        return self.var.aval


class _Equation(NamedTuple):
    """An equation, maybe of a call's jaxpr."""

    primitive: jex.Primitive
    params: Mapping[str, Any]
    ins: tuple[Any, ...]  # variables and literals
    outs: tuple[Any, ...]


def _inlined(jaxpr: Any, values: dict[Any, Any], call: tuple[int, ...] = ()) -> list[_Equation]:
    """The equations of a jaxpr and of the calls in it; `values` of the variables of a call's jaxpr."""
    equations = []

    def of(var: Any) -> Any:
        if not isinstance(var, jex.Literal) and call:
            return values.setdefault(var, _Inner(call, var))
        return var

    for number, eqn in enumerate(jaxpr.eqns):
        ins, outs = tuple(map(of, eqn.invars)), tuple(map(of, eqn.outvars))
        closed = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if eqn.primitive.name not in _CALLS or getattr(closed, "consts", True):
            equations.append(_Equation(eqn.primitive, eqn.params, ins, outs))
            continue
        within = dict(zip(closed.jaxpr.invars, ins, strict=True))
        equations += _inlined(closed.jaxpr, within, (*call, number))
        results = (var if isinstance(var, jex.Literal) else within[var] for var in closed.jaxpr.outvars)
        equations += [_Equation(lax.copy_p, {}, (x,), (out,)) for x, out in zip(results, outs, strict=True)]
    return equations


class _NotElementwise(Exception):
    """A value that the kernel neither computes nor reads."""


class _ProducerFinder:
    """The way back from an operand."""

    def __init__(self, made: Mapping[Any, _Equation], uses: Mapping[Any, int], aval: Any) -> None:
        self.made, self.uses, self.shape = made, uses, aval.shape
        self.inputs: dict[Any, tuple[str, tuple[int, ...]]] = {}  # variable -> place and shape
        self.operations: list[tuple[Any, ...]] = []
        self.known: dict[Any, Any] = {}  # variable -> its value: a constant, an input or an operation

    def producer(self, var: Any) -> Producer | None:
        """How the operand is computed; None if the kernel cannot, or need not."""
        try:
            result = self.value(var, is_result=True)
        except _NotElementwise:
            return None
        places, shapes = zip(*self.inputs.values(), strict=True) if self.inputs else ((), ())
        is_small = len(places) <= MOST_INPUTS and len(self.operations) <= MOST_OPERATIONS
        if var in self.inputs or ENTRIES not in places or places.count(ROWS) > MOST_ROWS or not is_small:
            return None
        numbers = {("input", x): n for n, x in enumerate(self.inputs)}
        numbers |= {("operation", n): len(places) + n for n in range(len(self.operations))}
        operations = (
            Operation(
                primitive, params, tuple(x if isinstance(x, float) else numbers[x] for x in operands), dtype
            )
            for primitive, params, operands, dtype in self.operations
        )
        expression = Expression(places, tuple(operations), numbers[result])
        return Producer(expression, tuple(self.inputs), shapes, self.shape[:-1])

    def value(self, var: Any, is_result: bool = False) -> Any:
        """The value of a variable or a literal."""
        if isinstance(var, jex.Literal):  # a scalar
            return float(var.val)
        if var not in self.known:
            eqn = self.made.get(var)
            if (constant := self.constant(eqn)) is not None:
                self.known[var] = constant
            elif eqn is not None and (is_result or self.is_cheap(var, eqn)):
                self.known[var] = self.computed(eqn, var)
            else:
                self.known[var] = self.input(var, var.aval.shape)
        return self.known[var]

    def constant(self, eqn: _Equation | None) -> float | None:
        """The constant that equations broadcast; None if it is none."""
        while eqn is not None and eqn.primitive.name in _MOVES:
            x = eqn.ins[0]
            if isinstance(x, jex.Literal):
                return float(x.val)
            eqn = self.made.get(x)
        return None

    def is_cheap(self, var: Any, eqn: _Equation) -> bool:
        """Whether the kernel computes a value, rather than reads it."""
        variables: set[Any] = {x for x in eqn.ins if not isinstance(x, jex.Literal)}
        full = [x for x in variables if x.aval.shape == self.shape]
        return var.aval.shape == self.shape and (self.uses[var] == 1 or len(full) <= 1)

    def computed(self, eqn: _Equation, var: Any) -> Any:
        """The value of an equation."""
        if eqn.primitive is lax.logistic_p:  # as XLA expands it, which rounds each step
            x = self.operation(lax.neg_p, (), (self.value(eqn.ins[0]),), var)
            x = self.operation(lax.exp_p, (("accuracy", None),), (x,), var)
            return self.operation(lax.div_p, (), (1.0, self.operation(lax.add_p, (), (1.0, x), var)), var)
        if eqn.primitive is lax.integer_pow_p and eqn.params["y"] < 0:
            # The same, since Triton has no reciprocal of bfloat16.
            params = (("y", -eqn.params["y"]),)
            x = self.operation(lax.integer_pow_p, params, (self.value(eqn.ins[0]),), var)
            return self.operation(lax.div_p, (), (1.0, x), var)
        if eqn.primitive in _ELEMENTWISE:
            operands = tuple(map(self.value, eqn.ins))
            return self.operation(eqn.primitive, tuple(sorted(eqn.params.items())), operands, var)
        if eqn.primitive.name not in _MOVES:
            return self.input(var, var.aval.shape)
        x: Any = eqn.ins[0]
        if x.aval.shape == var.aval.shape:
            if x.aval.dtype == var.aval.dtype:
                return self.value(x)
            return self.operation(lax.convert_element_type_p, (), (self.value(x),), var)
        if eqn.primitive.name != "broadcast_in_dim":
            raise _NotElementwise
        shape = [1] * len(self.shape)
        for axis, dim in zip(eqn.params["broadcast_dimensions"], x.aval.shape, strict=True):
            shape[axis] = dim
        return self.input(x, tuple(shape))

    def operation(self, primitive: Any, params: Any, operands: Any, var: Any) -> Any:
        """One more operation, which makes `var`."""
        if var.aval.dtype not in _DTYPES:
            raise _NotElementwise
        self.operations.append((primitive, params, operands, var.aval.dtype))
        return "operation", len(self.operations) - 1

    def input(self, var: Any, shape: tuple[int, ...]) -> Any:
        """A variable as an input; `shape` is its shape with all dims."""
        if isinstance(var, _Inner) or var.aval.dtype not in _DTYPES:
            raise _NotElementwise
        eqn = self.made.get(var)
        if shape == self.shape:
            place = ENTRIES
            if eqn and eqn.primitive not in _ELEMENTWISE and eqn.primitive.name not in _STORED:
                raise _NotElementwise
        elif len(shape) == len(self.shape) and shape[-1] == 1:
            place = ROWS
        elif math.prod(shape) == self.shape[-1]:
            place = COLUMNS
        else:
            raise _NotElementwise
        if self.inputs.setdefault(var, (place, shape)) != (place, shape):
            raise _NotElementwise
        return "input", var
