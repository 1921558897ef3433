"""A model's variables: collections by name, as Flax keeps them.

    {"params": {"fc": {"kernel": k}},                              # what is trained
     "_overwrite_with_gradient": {"fc": {"kernel": state}},        # how FP8 tensors are scaled
     "loss_scale": {"scale": s, "good_steps": n},                  # float16 GEMMs only
     "frozen": {"fc": {"kernel": k}}}                              # what is not trained, beside adapters

The second collection has the name that Flax's TrainState, TransformerEngine and MaxText know:
its "gradient" is its new value.
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

# All others are the module's own, such as batch statistics, and change as it says.
OURS = (PARAMS, SCALING, LOSS_SCALE, FROZEN)


def has_params(variables: Any) -> bool:
    """Whether `variables` are collections, not parameters alone."""
    return isinstance(variables, Mapping) and PARAMS in variables


class _Names(tuple[str, ...]):
    """The names of collections, and with them their arrays' origin; compared and hashed as names alone."""

    origin: Any = None


@jax.tree_util.register_pytree_with_keys_class
class Gradients(dict[str, Any], metaclass=ShowsRemedy):
    """The gradients of whole variables: a dict of collections, of which some are no gradients.

    What clips, scales, averages or adds to all of its arrays alike would spoil the scaling state. Where a
    tree of another type is expected, as beside an optimizer's moments, JAX's error shows this class, which
    says what to do. Where it stands alone, it remembers in `jax.tree.map` which arrays came, and
    `check_gradients` sees that they are others. This holds within one function that is being compiled: on the
    way into it and out of it all arrays are new.

    Its collections are plain trees, and new ones are put in by `with_collections`.
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
            # Weak: JAX keeps structures of trees for longer than a tracer may live.
            self.origin = origin if is_known else (here, tuple(map(weakref.ref, leaves)))

    def others(self) -> list[Any]:
        """The leaves that are no gradients."""
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
    """What an optimizer made of `Gradients`."""

    remedy = (
        "fp8jax's updates of whole variables: take the step by fp8jax.apply_updates; fp8jax.optim skips and "
        "counts steps that are not finite itself (fp8jax.optim.skipped), optax.apply_if_finite is not needed"
    )


def check_gradients(grads: Any, variables: Any = None) -> None:
    """Raises TypeError if the scaling state in `Gradients` was changed.

    Within one compiled function that is known of each array. Outside of one, where `variables` are given, it
    shows in windows of amaxes that are not the last step's, moved by one.
    """
    if not isinstance(grads, Gradients):
        return
    if grads.origin is None:
        if has_params(variables) and not all(map(_is_moved, _windows(variables), _windows(grads))):
            raise _changed(grads)
        return
    for reference, new in zip(grads.origin[1], grads.others(), strict=True):
        old = reference()
        if old is not None and old is not new:
            raise _changed(grads)


def _changed(grads: Gradients) -> TypeError:
    return TypeError(f"`updates`: something changed the scaling state in {type(grads).remedy}.")


def _windows(variables: Mapping[str, Any]) -> list[Any]:
    """The windows of amaxes of delayed scaling, shape=(..., operands, history)."""
    leaves, _ = jax.tree.flatten_with_path(variables.get(SCALING, {}))
    return [leaf for path, leaf in leaves if getattr(path[-1], "key", None) == "amax_history"]


def _is_moved(old: Any, new: Any) -> bool:
    """Whether each window is the old one moved by one, or as it was, as far as that is known here."""
    for x in (old, new):
        is_concrete = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
        if not is_concrete or x.is_deleted() or not x.is_fully_addressable:
            return True
    old, new = np.asarray(old), np.asarray(new)
    moved = (new[..., 1:] == old[..., :-1]).all(-1)
    return bool((moved | (new == old).all(-1)).all())


def sealed(grads: Any) -> Any:
    """Gradients of whole variables that hold a scaling state or a loss scale, as `Gradients`."""
    if not has_params(grads) or not jax.tree.leaves([grads[name] for name in grads if name != PARAMS]):
        return grads
    return Gradients(grads)


def with_collections(grads: Mapping[str, Any], new: Mapping[str, Any], kind: type[Gradients]) -> Any:
    """`grads` with these new collections; of the kind if it is a `Gradients`."""
    new = {**grads, **new}
    return kind(new) if isinstance(grads, Gradients) else new
