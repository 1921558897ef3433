"""A model's variables: collections by name, as in Flax.

    {"params": {"fc": {"kernel": k}},                              # trained
     "_overwrite_with_gradient": {"fc": {"kernel": state}},        # scaling states
     "loss_scale": {"scale": s, "good_steps": n},                  # float16 GEMMs only
     "frozen": {"fc": {"kernel": k}}}                              # not trained; models with adapters only

Flax's TrainState, TransformerEngine and MaxText know the name of the second collection: its "gradient" is its
new value.
"""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.core
import numpy as np
from jax.extend.core import get_opaque_trace_state

from fp8jax.remedy import ShowsRemedy

PARAMS = "params"
SCALING = "_overwrite_with_gradient"
LOSS_SCALE = "loss_scale"
FROZEN = "frozen"

# Other collections, such as batch statistics, belong to the module.
OURS = (PARAMS, SCALING, LOSS_SCALE, FROZEN)


def has_params(variables: Any) -> bool:
    """Whether `variables` are collections rather than parameters."""
    return isinstance(variables, Mapping) and PARAMS in variables


class _Names(tuple[str, ...]):
    """The names of collections, compared and hashed as a tuple, with their `Gradients.origin`."""

    origin: Any = None


@jax.tree_util.register_pytree_with_keys_class
class Gradients(dict[str, Any], metaclass=ShowsRemedy):
    """The gradients of whole variables: a dict of collections, of which only "params" holds gradients.

    A transformation that clips, scales, averages or adds noise to all arrays would destroy the scaling state.
    This class detects it in two ways:

    * Where JAX expects a tree of another type, such as an optimizer's moments, its error shows this class as
      the `remedy`.
    * It remembers the arrays that it was made of, also through `jax.tree.map`, so `check_gradients` sees
      whether they are still the same. This works inside one function under `jax.jit`: its arguments and
      results are new arrays.

    `with_collections` puts in new collections.
    """

    remedy = (
        "fp8jax's gradients of whole variables: their scaling state is no gradient; put optax's "
        "transformations in fp8jax.optim.on_params(...), and take the step by fp8jax.apply_updates"
    )

    def __init__(self, collections: Mapping[str, Any] | Iterable[Any], origin: Any = None):
        super().__init__(collections)
        here, leaves = get_opaque_trace_state(convention="fp8jax"), self.others()
        self.origin: Any = None
        if leaves and all(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            is_known = origin is not None and origin[0] == here
            # Weak references, because JAX keeps tree structures for longer than a tracer may live.
            self.origin = origin if is_known else (here, tuple(map(weakref.ref, leaves)))

    def others(self) -> list[Any]:
        """The arrays that are no gradients."""
        return jax.tree.leaves([self[name] for name in sorted(self) if name != PARAMS])

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """See `jax.tree_util.register_pytree_with_keys_class`."""
        names = _Names(sorted(self))
        names.origin = self.origin
        return [(jax.tree_util.DictKey(name), self[name]) for name in names], names

    @classmethod
    def tree_unflatten(cls, names: _Names, children: Any) -> "Gradients":
        """See `jax.tree_util.register_pytree_with_keys_class`."""
        return cls(zip(names, children, strict=True), names.origin)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


@jax.tree_util.register_pytree_with_keys_class
class Updates(Gradients):
    """An optimizer's updates, made from `Gradients`."""

    remedy = (
        "fp8jax's updates of whole variables: take the step by fp8jax.apply_updates; fp8jax.optim skips and "
        "counts steps that are not finite itself (fp8jax.optim.skipped), optax.apply_if_finite is not needed"
    )


def check_gradients(grads: Any, variables: Any = None) -> None:
    """Raises TypeError if the scaling state in `Gradients` was changed.

    Inside a function under `jax.jit` each array must be the original. Elsewhere, and only if `variables` are
    given, each window of amaxes must be the last step's, moved by one.
    """
    if not isinstance(grads, Gradients):
        return
    if grads.origin is None:
        is_same = not has_params(variables) or all(map(_is_moved, _windows(variables), _windows(grads)))
    else:
        pairs = zip(grads.origin[1], grads.others(), strict=True)
        is_same = all(old() is None or old() is new for old, new in pairs)
    if not is_same:
        raise TypeError(f"`updates`: something changed the scaling state in {type(grads).remedy}.")


def _windows(variables: Mapping[str, Any]) -> list[Any]:
    """The windows of amaxes of delayed scaling, shape=(..., operands, history)."""
    leaves, _ = jax.tree.flatten_with_path(variables.get(SCALING, {}))
    return [leaf for path, leaf in leaves if getattr(path[-1], "key", None) == "amax_history"]


def _is_moved(old: Any, new: Any) -> bool:
    """Whether each window is the old one, or the old one moved by one; True if values are not available."""
    for x in (old, new):
        is_concrete = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
        if not is_concrete or x.is_deleted() or not x.is_fully_addressable:
            return True
    old, new = np.asarray(old), np.asarray(new)
    moved = (new[..., 1:] == old[..., :-1]).all(-1)
    return bool((moved | (new == old).all(-1)).all())


def with_collections(grads: Mapping[str, Any], new: Mapping[str, Any], kind: type[Gradients]) -> Any:
    """`grads` with these new collections, as `kind` if it is a `Gradients`."""
    new = {**grads, **new}
    return kind(new) if isinstance(grads, Gradients) else new
