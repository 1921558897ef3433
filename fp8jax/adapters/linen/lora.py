"""Linen modules with frozen kernels and trained adapters.

    model = fp8jax.transform(module, "O2", lora=fp8jax.LoRA(rank=8))
    variables = model.adapt(key, pretrained, x)       # or model.init(key, x)
    {"params": {"fc": {"lora_a": a, "lora_b": b}},    # trained
     "frozen": {"fc": {"kernel": k, "bias": b}},      # the module's own parameters
     "_overwrite_with_gradient": ...}

Gradients and optimizers look at "params", so they see the adapters alone.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.core

from fp8jax.adapters.linen.boxes import with_plain_boxes
from fp8jax.adapters.linen.model import LinenModel, check_same, leaves_of, module_variables
from fp8jax.quantization import is_scaled
from fp8jax.variables import FROZEN, OURS, PARAMS


def _alive(leaf: Any, own: Any) -> Any:
    """A parameter of the plain module; the frozen one, if a donating step deleted the array, which `adapt`
    shares."""
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return own if is_array and not is_scaled(own) and leaf.is_deleted() else leaf


class LoRAModel(LinenModel):
    """A Linen module with adapters; made by `fp8jax.transform`."""

    def init_with_output(self, rngs: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """`module.init_with_output`, and `adapt` of its variables."""
        out, plain = self.module.init_with_output(rngs, *args, **kwargs)
        return out, self._adapt(rngs, plain, *args, **kwargs)

    def adapt(self, rngs: Any, plain: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """This model's variables, from those of the untransformed module.

        Args:
            rngs: the random key for A, or a dict with the key under "params".
            plain: variables of the module, e.g. a pretrained model's.
            args, kwargs: the model's inputs, arrays or `jax.ShapeDtypeStruct`s. Nothing is computed.

        Returns:
            The collections of `plain`, with its "params" in "frozen" and the kernels of layers under the
            recipe in the format of `LoRA.weight`; "params" has the adapters, float32.

        Raises:
            ValueError: a pattern of the recipe, a rule or a target matches no layer, or a target matches a
                layer that cannot have adapters; a kernel is missing in `plain`, or has another shape.
        """
        own = leaves_of("plain", self._shapes(rngs, args, kwargs))
        check_same("plain", leaves_of("plain", plain), own, "the module")
        return self._adapt(rngs, plain, *args, **kwargs)

    def _adapt(self, rngs: Any, plain: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        key = rngs[PARAMS] if isinstance(rngs, Mapping) else rngs
        own = {name: tree for name, tree in plain.items() if name == PARAMS or name not in OURS}
        return self._from_plain(functools.partial(self._function.adapt, key), rngs, own, *args, **kwargs)

    def merge(self, variables: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The untransformed module's variables, with the adapters in its kernels: W + (alpha / rank) A B.

        Args:
            variables: this model's variables.
            base: the untransformed module's variables that `variables` were made from. Without them W is the
                frozen kernel, rounded to its storage format.

        Raises:
            ValueError: `base` has other parameters.
        """
        return self.dequantize(variables) if base is None else self._added("base", base, variables, 1.0)

    def unmerge(self, merged: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse of `merge`: `merged` without the adapters of `variables`, W up to float32 rounding."""
        return self._added("merged", merged, variables, -1.0)

    def _added(
        self, argument: str, plain: Mapping[str, Any], variables: Mapping[str, Any], times: float
    ) -> dict[str, Any]:
        """Variables of the untransformed module with `times` the adapters added to the kernels."""
        frozen = leaves_of("variables", variables, FROZEN)
        check_same(argument, leaves_of(argument, plain), frozen, "`variables`")
        leaves, treedef = jax.tree.flatten(plain[PARAMS], is_leaf=is_scaled)
        alive = treedef.unflatten(map(_alive, leaves, frozen.values()))
        params = self._function.with_adapters(alive, variables[PARAMS], times)
        return {**module_variables(plain), PARAMS: with_plain_boxes(params)}
