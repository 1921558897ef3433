"""`Recorder`: a plug-in of a dot that adds zeros to the output, and records operands in the backward.

The backward of the zeros sees the input, the kernel and the output gradient, and computes the weight
gradient. The numbers leave as the cotangent of `slots`, an argument that nothing reads, as the next scaling
state leaves an FP8 dot.

The experts of a ragged dot are recorded one after the other, each with its rows and zeros for all others.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.dot.layout import Layout, contract
from fp8jax.dot.row_tiles import ExpertSharding
from fp8jax.inspect.numerics.measures import OPERANDS, WGRAD, channels, key_of, measured, operand_codes
from fp8jax.quantization import value
from fp8jax.recipe import Recipe
from fp8jax.rewrite.plan import DotState, Kernel, PlannedDot
from fp8jax.scaling import GRAD, LHS, RHS
from fp8jax.scaling.base import starts_of
from fp8jax.scaling.merge import broadcast_under_vmap, from_cotangents, to_cotangents

_MATRICES = contract("mk,kn")


class Records(NamedTuple):
    """The numbers of a dot, with the axes of stacked layers and of experts in front."""

    uses: Any  # shape=(), float32: how often the dot was computed; of an expert, how often it had rows
    sums: Any  # shape=(operands, recipes, 3), float32, see `Measures`
    noise: Any  # for each operand `Measures.noise`, shape=(recipes, channels)
    maxes: Any  # shape=(operands, recipes, 2)
    channels: Any  # for each operand the amaxes of its channels, see `measures.channels`

    @classmethod
    def slots(cls, planned: PlannedDot, recipes: int) -> "Records":
        """Zeros for a dot, with the numbers as their cotangent."""
        _, inputs, outputs = planned.dot.gemm
        layers, count = planned.kernel.layers, (len(OPERANDS), recipes)
        layers += (planned.dot.groups,) if planned.dot.groups else ()
        sizes = ((inputs,), (outputs, inputs), (outputs,), (outputs, inputs))
        new = functools.partial(jnp.zeros, dtype=jnp.float32)
        zeros = [tuple(new((*layers, size)) for size in each) for each in sizes]
        noise = [tuple(new((*layers, recipes, size)) for size in each) for each in sizes]
        maxes = to_cotangents((new((*layers, *count, 2)), zeros))
        return cls(new(layers), new((*layers, *count, 3)), noise, *maxes)

    def numbers(self) -> "Records":
        """The numbers, of slots that are cotangents."""
        return self._replace(**from_cotangents({"maxes": self.maxes, "channels": self.channels}))


class _Static(NamedTuple):
    recipes: tuple[Recipe, ...]
    own: int | None
    layout: Layout  # of the dot, or of one expert's
    dtype: Any
    devices: int = 1  # that share the experts and their rows


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("records", "seeds", "state", "inner"),
    meta_fields=("recipes", "own", "groups"),
)
@dataclasses.dataclass(frozen=True)
class Recorder:
    """A recorder of one dot; see `DotState.plugin`.

    Attributes:
        records: its slots.
        seeds: for each recipe the first scaling state, {} for most.
        recipes: the recipes to measure.
        own: the index of the dot's own recipe among them; None for a dot in high precision.
        groups: the number of experts; 0 without experts.
        state: the dot's scaling state.
        inner: another plug-in of the dot.
    """

    records: Records
    seeds: tuple[Any, ...]
    recipes: tuple[Recipe, ...]
    own: int | None
    groups: int = 0
    state: Any = None
    inner: Any = None

    @classmethod
    def of(cls, planned: PlannedDot, recipes: tuple[Recipe, ...]) -> "Recorder":
        """The recorder of a dot under these recipes and, if it is not in high precision, under its own."""
        own, index = planned.kernel.recipe, None
        if own != Recipe.FP32:
            recipes = recipes if own in recipes else (own, *recipes)
            index = recipes.index(own)
        seeds = [planned.kernel._replace(recipe=recipe).first_state(planned.key) for recipe in recipes]
        seeds = tuple({name: x for name, x in seed.items() if name == "key"} for seed in seeds)
        return cls(Records.slots(planned, len(recipes)), seeds, recipes, index, planned.dot.groups)

    @property
    def depth(self) -> int:
        """The number of leading axes, of stacked layers."""
        return self.records.uses.ndim - bool(self.groups)

    def around(self, state: DotState) -> DotState:
        """The state of the dot, with this recorder."""
        return state._replace(plugin=dataclasses.replace(self, state=state.scaling, inner=state.plugin))

    def output(
        self, lhs: jax.Array, kernel: Any, dimension_numbers: lax.DotDimensionNumbers, *, dtype: Any
    ) -> jax.Array:
        """Zeros, or what the inner plug-in adds."""
        zeros = self._zeros(Layout.of(lhs.shape, kernel.shape, dimension_numbers), lhs, kernel, dtype)
        if self.inner is None:
            return zeros
        return zeros + self.inner.output(lhs, kernel, dimension_numbers, dtype=dtype)

    def output_of_groups(
        self, lhs: jax.Array, kernel: Any, sizes: jax.Array, *, over: ExpertSharding | None, dtype: Any
    ) -> jax.Array:
        """The same for a ragged dot; operands as those of `fp8jax.dot.ragged_dot`."""
        assert self.inner is None  # experts have no other plug-ins
        devices = over.mesh.shape[over.axis_name] if over else 1
        layout = Layout.of(lhs.shape, kernel.shape[1:], _MATRICES)
        return self._zeros(layout, lhs, kernel, dtype, sizes, devices)

    def _zeros(
        self, layout: Layout, lhs: jax.Array, kernel: Any, dtype: Any, sizes: Any = None, devices: int = 1
    ) -> Any:
        records = broadcast_under_vmap(self.records, lhs, *jax.tree.leaves((sizes, kernel.value)))
        static = _Static(self.recipes, self.own, layout, jnp.dtype(dtype), devices)
        return _recorded(static, records, lhs, kernel.value, self.seeds, self.state, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recorded(
    static: _Static, records: Records, lhs: jax.Array, rhs: Any, seeds: Any, state: Any, sizes: Any
) -> jax.Array:
    """Zeros like the output of a dot; of a ragged dot, if `sizes` is not None."""
    del records, seeds, state, sizes
    return jnp.full(static.layout.out_shape, _zero(lhs, rhs), static.dtype)


def _zero(*operands: Any) -> jax.Array:
    """Zero for each example of a vmap of the operands. JAX sums cotangents over the examples of results, and
    of gradients, that depend on them."""
    some = sum(jnp.sum(x.ravel()[:1].astype(jnp.float32)) for x in jax.tree.leaves(operands))
    return jnp.where(jnp.isnan(some), 0.0, 0.0)


def _forward(static: _Static, records: Records, *operands: Any) -> tuple[jax.Array, Any]:
    return _recorded(static, records, *operands), operands


def _backward(static: _Static, operands: Any, grad: jax.Array) -> tuple[Any, ...]:
    lhs, rhs, seeds, state, sizes = operands
    if sizes is None:
        lhs = static.layout.lhs.to_matrix(lhs)
        grad = grad.reshape(*lhs.shape[:-1], static.layout.rhs.matrix[-1])
        found = _records(static, lhs, grad, rhs, seeds, state)
    else:
        found = _records_of_groups(static, lhs, grad, rhs, seeds, state, sizes)
    uses, sums, noise = jax.tree.map(lambda x: x + _zero(lhs, rhs), found[:3])
    return found._replace(uses=uses, sums=sums, noise=noise), None, None, None, None, None


_recorded.defvjp(_forward, _backward)


def _records_of_groups(
    static: _Static, lhs: jax.Array, grad: jax.Array, rhs: Any, seeds: Any, state: Any, sizes: jax.Array
) -> Records:
    """The numbers of each expert's dot."""
    groups, rows = sizes.shape[0] // static.devices, lhs.shape[0] // static.devices
    # Each device has its experts and their rows.
    starts = jax.vmap(starts_of)(sizes.reshape(static.devices, groups)).reshape(-1)
    starts += jnp.repeat(rows * jnp.arange(static.devices), groups)
    numbers = jnp.arange(lhs.shape[0])[:, None]

    def of_group(group: Any) -> Records:
        start, size, rhs, seeds, state = group
        is_own = (start <= numbers) & (numbers < start + size)
        of_lhs, of_grad = (jnp.where(is_own, x, 0) for x in (lhs, grad))
        share = jnp.maximum(size, 1) / lhs.shape[0]
        found = _records(static, of_lhs, of_grad, rhs, seeds, state, share)
        uses, sums, noise = jax.tree.map(lambda x: jnp.where(size > 0, x, 0), found[:3])
        return found._replace(uses=uses, sums=sums, noise=noise)

    return lax.map(of_group, (starts, sizes, rhs, seeds, state))


def _records(
    static: _Static, rows: jax.Array, grad: jax.Array, rhs: Any, seeds: Any, state: Any, share: Any = None
) -> Records:
    """The numbers of one dot.

    Args:
        static: of the dot.
        rows: the input, shape=([batch,] m, k).
        grad: the output gradient, shape=([batch,] m, n).
        rhs: the kernel in its own shape, as it is stored.
        seeds: see `Recorder`.
        state: see `Recorder`.
        share: the share of the rows that count, the others being zeros; by default all.
    """
    layout = static.layout
    plain = {LHS: rows, RHS: layout.rhs.to_matrix(value(rhs)), GRAD: grad}
    plain = {operand: x.astype(jnp.float32) for operand, x in plain.items()}
    plain = lax.optimization_barrier(plain)
    plain[WGRAD] = jnp.einsum("...mk,...mn->...kn", plain[LHS], plain[GRAD], precision="highest")
    of_channels = [channels(operand, x) for operand, x in plain.items()]
    as_given: dict[int, Any] = {LHS: rows, RHS: rhs, GRAD: grad, WGRAD: plain[WGRAD]}

    def measures(operand: int, number: int) -> Any:
        recipe, is_own = static.recipes[number], number == static.own
        x = as_given[operand]
        if operand == RHS and not is_own:
            x = Kernel(recipe, (), 0).in_format(value(x))
        own_state = state if is_own else seeds[number]
        codes = operand_codes(recipe, operand, x, layout.rhs, own_state or None)
        return measured(
            plain[operand], codes, of_channels[operand], share if operand in (LHS, GRAD) else None
        )

    found: dict[Any, Any] = {}
    table = []
    for operand in plain:
        keys = [
            (operand, number if number == static.own else key_of(recipe, operand))
            for number, recipe in enumerate(static.recipes)
        ]
        for number, key in enumerate(keys):
            found[key] = found[key] if key in found else measures(operand, number)
        table.append([found[key] for key in keys])
    sums = jnp.stack([jnp.stack([each.sums for each in row]) for row in table])
    maxes = jnp.stack([jnp.stack([each.maxes for each in row]) for row in table])
    noise = [tuple(map(jnp.stack, zip(*(each.noise for each in row), strict=True))) for row in table]
    maxes, of_channels = to_cotangents((maxes, of_channels))
    return Records(jnp.ones((), jnp.float32), sums, noise, maxes, of_channels)
