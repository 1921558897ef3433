"""ZeRO: what of a training state each device keeps, said once as a value.

    zero = Zero(mesh, "O2", stage=2)
    variables = zero.place(model.init(key, x))
    tx = fp8jax.optim.adamw(3e-4, "O2", zero=zero)
    loss, grads = fp8jax.value_and_grad(loss_fn, zero=zero)(variables, batch)

| stage | each device keeps its part of | what crosses in a step, in the recipe's formats |
|---|---|---|
| 0 | nothing: plain data parallelism | gradients, reduced |
| 1 | moments and masters | gradients, reduced in parts; new weights, gathered |
| 2 | and gradients | the same, each kernel's in the backward as soon as there is one |
| 3 | and weights | gradients as in 2; E4M3 kernels, gathered where they are used, twice |

A tensor is split along one of its last two axes, the first that divides by the devices; others, and
vectors, are whole everywhere. (A stack of layers has its axis in front.) Its scale is that of the
whole tensor, on all devices. Everything outside of `value_and_grad` and the optimizer is JAX's own
engine: arrays are global, and any optax link sees whole tensors.

References:
    ZeRO, arXiv 1910.02054; FP8-LM, arXiv 2310.18313, section 2.3; MS-AMP's ZeRO optimizers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.core
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8jax.recipe import Recipe
from fp8jax.scaled import ScaledArray, is_scaled
from fp8jax.variables import PARAMS, has_params

HOST = "pinned_host"


@dataclasses.dataclass(frozen=True)
class Zero:
    """A stage of ZeRO on the devices of a mesh.

    Attributes:
        mesh: of the devices.
        recipe: its `comm` column says what gradients cross in.
        stage: 0 to 3, see this module.
        axis_name: the mesh axis over which the batch is split; "" if the mesh has only one. Other
            axes are left to JAX: kernels sharded along them stay so.
        offload: whether moments and masters are kept in the host's memory, and fetched for the step.

    Raises:
        ValueError: no such stage or axis, or `offload` where devices cannot reach the host's memory.
    """

    mesh: Mesh
    recipe: Recipe | str = "O2"
    stage: int = 0
    axis_name: str = ""
    offload: bool = False

    def __post_init__(self) -> None:
        if self.stage not in range(4):
            raise ValueError(f"`stage`: expected 0, 1, 2 or 3; got {self.stage!r}.")
        names = self.mesh.axis_names
        if self.axis_name not in names and (self.axis_name or len(names) != 1):
            wanted = "the one to split the batch over" if not self.axis_name else f"{self.axis_name!r}"
            raise ValueError(f"`axis_name`: expected one of the mesh's axes {names}; got {wanted}.")
        Recipe.parse(self.recipe)
        if self._is_explicit and len(names) > 1:
            kinds = ", ".join(str(kind) for kind in self.mesh.axis_types)
            raise ValueError(
                f"`mesh`: expected Auto axes where there are several; got {kinds}. Make the mesh with "
                "`axis_types=(jax.sharding.AxisType.Auto,) * n`."
            )
        if self.offload and (reason := _why_no_offload(self.mesh)):
            raise ValueError(f"`offload`: {reason}")

    @property
    def axis(self) -> str:
        """The name of the axis over which the batch is split."""
        return self.axis_name or self.mesh.axis_names[0]

    @property
    def devices(self) -> int:
        """The number of parts."""
        return self.mesh.shape[self.axis]

    def split_of(self, leaf: Any) -> int | None:
        """The axis, from the end, along which an array or `ScaledArray` is split; None if it is whole."""
        if self.devices == 1:
            return None
        blocks = leaf.scale.shape if is_scaled(leaf) and leaf.scale.ndim else (1,) * leaf.ndim
        for axis in (-2, -1):
            if leaf.ndim >= 2 and leaf.shape[axis] % self.devices == 0 and blocks[axis] == 1:
                return axis
        return None

    def spec(self, leaf: Any, *, split: bool) -> Any:
        """The `PartitionSpec` of a leaf's array; of a `ScaledArray` a pair of them."""
        axis = self.split_of(leaf) if split else None
        names: list[Any] = [None] * leaf.ndim
        if axis is not None:
            names[axis] = self.axis
        spec = P(*names) if axis is not None else P()
        return ScaledArray(spec, P()) if is_scaled(leaf) else spec

    def specs(self, tree: Any, *, split: bool) -> Any:
        """The `spec` of each leaf."""
        return jax.tree.map(lambda leaf: self.spec(leaf, split=split), tree, is_leaf=is_scaled)

    def place(self, variables: Any) -> Any:
        """Variables, or parameters, where the stage wants them: whole on every device, or its part of each.

        Within a jitted `init` no device ever holds more than that.
        """
        if has_params(variables):
            others = {name: self._placed_whole(tree) for name, tree in variables.items() if name != PARAMS}
            return {**others, PARAMS: self.place(variables[PARAMS])}
        return jax.tree.map(lambda leaf: self._put(leaf, leaf, self.stage == 3), variables, is_leaf=is_scaled)

    def _placed_whole(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: self._placed(x, P()), tree)

    def place_state(self, tree: Any, params: Any, memory: str | None = None) -> Any:
        """A tree of moments or masters of parameters where the stage wants it, or in the `memory` of that
        kind; `adam` and `adamw` do this."""
        memory = memory or (HOST if self.offload else None)

        def put(param: Any, kept: Any) -> Any:
            return None if kept is None else self._put(kept, param, self.stage >= 1, memory)

        return jax.tree.map(put, params, tree, is_leaf=is_scaled)

    def _put(self, leaf: Any, param: Any, split: bool, memory: str | None = None) -> Any:
        """An array or `ScaledArray` of a parameter's shape, split as the parameter would be."""
        axis = self.split_of(param) if split else None
        spec = self.spec(leaf, split=axis is not None)
        if is_scaled(leaf):  # scales stay at hand
            return ScaledArray(
                self._placed(leaf.data, spec.data, memory), self._placed(leaf.scale, spec.scale)
            )
        return self._placed(leaf, spec, memory)

    def _placed(self, x: Any, spec: P, memory: str | None = None) -> Any:
        if self._is_explicit:
            x = jax.sharding.reshard(x, NamedSharding(self.mesh, spec))
        else:
            if len(self.mesh.axis_names) > 1 and isinstance(x, jax.core.Tracer):
                # What other axes do with the other dims is the user's.
                spec = P(*(spec[i] if i < len(spec) and spec[i] else P.UNCONSTRAINED for i in range(x.ndim)))
            if not isinstance(x, jax.core.Tracer):  # wherever it is
                return jax.device_put(x, NamedSharding(self.mesh, spec, memory_kind=memory))
            x = lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))
        if memory is None:
            return x
        # (A constraint does not move arrays, and what moves them does not shard them.)
        return jax.device_put(x, NamedSharding(self.mesh, spec, memory_kind=memory))

    @property
    def _is_explicit(self) -> bool:
        return AxisType.Explicit in self.mesh.axis_types

    def on_each(self, function: Callable[..., Any], in_specs: Any, out_specs: Any, *args: Any) -> Any:
        """`function(*args)` on each device, of its parts of the arguments as the specs say."""
        if self._is_explicit:
            args = jax.tree.map(
                lambda spec, part: jax.tree.map(lambda x: self._placed(x, spec), part),
                in_specs,
                args,
                is_leaf=lambda node: isinstance(node, P),
            )
        run = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={self.axis},
            check_vma=False,
        )
        # Outside of `jit` each operation would run by itself, which arrays of extended dtypes do not.
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args))
        return run(*args) if is_traced else jax.jit(run)(*args)


def own_part(x: jax.Array, spread_axis: int | None, axis_name: str) -> jax.Array:
    """This device's part of an array that all have; the array itself if it is not split."""
    if spread_axis is None:
        return x
    axis = spread_axis % x.ndim
    size = x.shape[axis] // lax.axis_size(axis_name)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis_name) * size, size, axis)


def _why_no_offload(mesh: Mesh) -> str | None:
    for device in mesh.devices.flat:
        kinds = [memory.kind for memory in device.addressable_memories()]
        if HOST not in kinds:
            # JAX compiles for a device that is only described as if there were no such memory.
            return (
                f"expected devices that reach memory of kind {HOST!r}; {device} has "
                f"{', '.join(kinds) or 'none that is known'}. Leave `offload` out: a higher stage saves "
                "memory on any platform."
            )
    return None
