"""ZeRO: sharding of weights, gradients and optimizer states over data-parallel devices.

    zero = Zero(mesh, stage=2)
    variables = zero.place(model.init(key, x))
    tx = fp8jax.optim.adamw(3e-4, "O2", zero=zero)
    loss, grads, variables = fp8jax.value_and_grad(loss_fn, zero=zero)(variables, batch)

| stage | sharded | collectives of a step, in the recipe's formats |
|---|---|---|
| 0 | nothing: plain data parallelism | all-reduce of gradients |
| 1 | moments and master weights | reduce-scatter of gradients; all-gather of new weights |
| 2 | gradients, too | the same; a kernel's gradient is reduce-scattered inside the backward |
| 3 | weights, too | gradients as in 2; all-gather of quantized kernels, in forward and backward |

A tensor is sharded along the second-to-last axis if the number of devices divides it, otherwise along the
last axis. Vectors, and tensors without such an axis, are replicated. The axis of stacked layers comes first.
All shards have the scale of the whole tensor. Outside `value_and_grad` and the optimizer, arrays are ordinary
global JAX arrays, so any optax transformation works on whole tensors.

References:
    ZeRO, arXiv 1910.02054; FP8-LM, arXiv 2310.18313, section 2.3; MS-AMP's ZeRO optimizers.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree, Shaped

from fp8jax.quantization import ScaledArray, is_scaled
from fp8jax.recipe import Recipe
from fp8jax.variables import PARAMS, has_params

HOST = "pinned_host"


@dataclasses.dataclass(frozen=True)
class Zero:
    """A stage of ZeRO on a mesh.

    Attributes:
        mesh: the device mesh.
        recipe: its `comm` column is the format in which gradients are sent. None takes the recipe of the
            transformed model in the loss. If there is none, gradients decide by their formats:
            `ScaledArray`s are sent in FP8, floats in FP32.
        stage: 0 to 3, see this module.
        axis_name: the mesh axis that shards the batch; "" for a mesh with one axis. JAX handles other axes:
            kernels sharded along them stay sharded.
        offload: whether to store moments and master weights in host memory, and copy them to the device for
            the step.

    Raises:
        ValueError: `mesh`, `stage` or `axis_name` is not legal, or `offload` with devices without host
            memory.
    """

    mesh: Mesh
    recipe: Recipe | str | None = None
    stage: int = 0
    axis_name: str = ""
    offload: bool = False

    def __post_init__(self) -> None:
        if self.stage not in range(4):
            raise ValueError(f"`stage`: expected 0, 1, 2 or 3; got {self.stage!r}.")
        if not isinstance(self.mesh, Mesh):
            raise ValueError(f"`mesh`: expected a jax.sharding.Mesh; got {type(self.mesh).__name__}.")
        names = self.mesh.axis_names
        if self.axis_name not in names and (self.axis_name or len(names) != 1):
            wanted = "the one to split the batch over" if not self.axis_name else f"{self.axis_name!r}"
            raise ValueError(f"`axis_name`: expected one of the mesh's axes {names}; got {wanted}.")
        if self.recipe is not None:
            Recipe.parse(self.recipe)
        if self._is_explicit and len(names) > 1:
            kinds = ", ".join(str(kind) for kind in self.mesh.axis_types)
            raise ValueError(
                f"`mesh`: expected Auto axes where there are several; got {kinds}. Make the mesh with "
                "`axis_types=(jax.sharding.AxisType.Auto,) * n`."
            )
        if self.offload:
            _check_offload(self.mesh)

    @property
    def axis(self) -> str:
        """The name of the mesh axis that shards the batch."""
        return self.axis_name or self.mesh.axis_names[0]

    @property
    def devices(self) -> int:
        """The number of shards."""
        return self.mesh.shape[self.axis]

    @property
    def shards_states(self) -> bool:
        """Whether moments and master weights are sharded, and each device updates its shards."""
        return self.stage >= 1

    @property
    def shards_gradients(self) -> bool:
        """Whether a kernel's gradient is reduce-scattered inside the backward."""
        return self.stage >= 2

    @property
    def shards_weights(self) -> bool:
        """Whether weights are sharded, and all-gathered for each of their GEMMs."""
        return self.stage == 3

    def split_of(self, leaf: Any) -> int | None:
        """The sharded axis (negative) of an array or `ScaledArray`; None if it is replicated."""
        if self.devices == 1:
            return None
        blocks = leaf.scale.shape if is_scaled(leaf) and leaf.scale.ndim else (1,) * leaf.ndim
        for axis in (-2, -1):
            if leaf.ndim >= 2 and leaf.shape[axis] % self.devices == 0 and blocks[axis] == 1:
                return axis
        return None

    def comm_of(self, recipes: Sequence[Recipe]) -> str | None:
        """The format in which gradients are sent: the format of the transformed models in the loss; None if
        the gradients decide, see `fp8jax.comm.reduce.reduced`.

        Raises:
            ValueError: `recipe` has another `comm` column.
        """
        told = None if self.recipe is None else Recipe.parse(self.recipe)
        own = next((recipe for recipe in recipes if recipe.comm == "FP8"), recipes[0] if recipes else told)
        if told is not None and own is not None and own.comm != told.comm:
            raise ValueError(
                f"`zero`: expected a recipe with comm={own.comm}, as the model's {own} has; got {told} with "
                f"comm={told.comm}. Leave it out, as in Zero(mesh, stage={self.stage})."
            )
        return None if own is None else own.comm

    def spec(self, leaf: Any, *, split: bool) -> Any:
        """The `PartitionSpec` of an array, or a `ScaledArray` of the specs of data and scale."""
        axis = self.split_of(leaf) if split else None
        names: list[Any] = [None] * leaf.ndim
        if axis is not None:
            names[axis] = self.axis
        spec = P(*names) if axis is not None else P()
        return ScaledArray(spec, P()) if is_scaled(leaf) else spec

    def specs(self, tree: PyTree, *, split: bool) -> PyTree:
        """The `spec` of each leaf."""
        return jax.tree.map(lambda leaf: self.spec(leaf, split=split), tree, is_leaf=is_scaled)

    def place(self, variables: PyTree) -> PyTree:
        """Places variables or parameters on the mesh: sharded in stage 3, otherwise replicated.

        In a jitted `init` no device stores more than its shards. An axis that `Zero` does not shard stays
        sharded over other axes of the mesh.
        """
        if has_params(variables):
            others = {name: tree for name, tree in variables.items() if name != PARAMS}
            others = jax.tree.map(lambda x: self._placed(x, P()), others)
            return {**others, PARAMS: self.place(variables[PARAMS])}
        return jax.tree.map(
            lambda leaf: self._put(leaf, leaf, self.shards_weights), variables, is_leaf=is_scaled
        )

    def place_state(self, tree: PyTree, params: PyTree, memory: str | None = None) -> PyTree:
        """Places moments or master weights on the mesh: sharded from stage 1 on, and over other axes of the
        mesh as the parameter is. Under `jax.jit` JAX chooses the sharding over other axes.

        `adam` and `adamw` call this.

        Args:
            tree: moments or master weights, a tree like `params`.
            params: the parameters.
            memory: memory kind; by default host memory with `offload`, otherwise device memory.
        """
        memory = memory or (HOST if self.offload else None)

        def put(param: Any, states: Any) -> Any:
            return jax.tree.map(
                lambda leaf: self._put(leaf, param, self.shards_states, memory), states, is_leaf=is_scaled
            )

        return jax.tree.map(put, params, tree, is_leaf=is_scaled)

    def replicated(self, x: Any) -> Any:
        """Places an array on the mesh, whole on each device.

        `adam` and `adamw` call this for what they count, so that a restored state is on one set of devices.
        """
        return self._placed(x, P())

    def _put(self, leaf: Any, param: Any, split: bool, memory: str | None = None) -> Any:
        """Places an array or `ScaledArray` of a parameter's shape with the parameter's sharding."""
        axis = self.split_of(param) if split else None
        spec = self.spec(leaf, split=axis is not None)
        if is_scaled(leaf):  # scales stay in device memory
            data = self._placed(leaf.data, self._with_other_axes(leaf, spec.data, param), memory)
            return ScaledArray(data, self._placed(leaf.scale, spec.scale))
        return self._placed(leaf, self._with_other_axes(leaf, spec, param), memory)

    def _with_other_axes(self, leaf: Any, spec: P, param: Any) -> P:
        """`spec`, with a concrete parameter's own sharding of other dims over other axes of the mesh."""
        array = param.data if is_scaled(param) else param
        own = None if isinstance(array, jax.core.Tracer) else getattr(array, "sharding", None)
        if not isinstance(own, NamedSharding) or own.mesh != self.mesh or leaf.shape != param.shape:
            return spec
        dims: list[Any] = [*spec, *[None] * (array.ndim - len(spec))]
        for i, names in enumerate(own.spec):
            names = names if isinstance(names, tuple) else (names,)
            dims[i] = dims[i] or tuple(name for name in names if name not in (None, self.axis)) or None
        return P(*dims) if any(dims) else spec

    def _placed(self, x: Any, spec: P, memory: str | None = None) -> Any:
        if self._is_explicit:
            x = jax.sharding.reshard(x, NamedSharding(self.mesh, spec))
        elif not isinstance(x, jax.core.Tracer):
            return jax.device_put(x, NamedSharding(self.mesh, spec, memory_kind=memory))
        else:
            if len(self.mesh.axis_names) > 1:
                # Leave the sharding of other dims over other mesh axes to the user.
                spec = P(*(spec[i] if i < len(spec) and spec[i] else P.UNCONSTRAINED for i in range(x.ndim)))
            x = lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))
        if memory is None:
            return x
        # A sharding constraint does not change the memory kind, and under jit `device_put` does not shard.
        return jax.device_put(x, NamedSharding(self.mesh, spec, memory_kind=memory))

    @property
    def _is_explicit(self) -> bool:
        return AxisType.Explicit in self.mesh.axis_types

    def on_each(self, function: Callable[..., Any], in_specs: Any, out_specs: Any, *args: Any) -> Any:
        """`function(*args)` under `jax.shard_map`, with these specs."""
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
        # jit, because eager operations do not support extended dtypes.
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args))
        return run(*args) if is_traced else jax.jit(run)(*args)


def own_part(x: Shaped[Array, "..."], axis: int | None, axis_name: str) -> Shaped[Array, "..."]:
    """This device's shard of a replicated array along `axis`; the whole array if `axis` is None."""
    if axis is None:
        return x
    axis %= x.ndim
    size = x.shape[axis] // lax.axis_size(axis_name)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis_name) * size, size, axis)


def _check_offload(mesh: Mesh) -> None:
    for device in mesh.devices.flat:
        kinds = [memory.kind for memory in device.addressable_memories()]
        if HOST not in kinds:
            # For a described device without hardware, JAX compiles as if it had no host memory.
            raise ValueError(
                f"`offload`: expected devices that reach memory of kind {HOST!r}; {device} has "
                f"{', '.join(kinds) or 'none that is known'}. Leave `offload` out: a higher stage saves "
                "memory on any platform."
            )
