"""A Linen module whose kernels are frozen and whose adapters are trained.

    model = fp8jax.transform(module, "O2", lora=fp8jax.LoRA(rank=8))
    variables = model.adapt(key, pretrained, x)       # or model.init(key, x)
    {"params": {"fc": {"lora_a": a, "lora_b": b}},    # what is trained
     "frozen": {"fc": {"kernel": k, "bias": b}},      # the module's own parameters
     "_overwrite_with_gradient": ...}

Since "params" is what gradients, optimizers and checkpoints look at, all of them see the adapters alone.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax

from fp8jax.adapters.linen.boxes import with_own_boxes, with_plain_boxes
from fp8jax.adapters.linen.model import LinenModel, by_path, check_same, collection, shapes_of, shapes_of_call
from fp8jax.quantization import is_scaled, own_value
from fp8jax.variables import FROZEN, OURS, PARAMS


class LoRAModel(LinenModel):
    """A Linen module with adapters; made by `fp8jax.transform`."""

    def init_with_output(self, rngs: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """`module.init_with_output`, and `adapt` of what it makes."""
        out, plain = self.module.init_with_output(rngs, *args, **kwargs)
        return out, self._adapt(rngs, plain, *args, **kwargs)

    def adapt(self, rngs: Any, plain: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """This model's variables, from those of the untransformed module.

        Args:
            rngs: a random key, or a dict with one under "params": for A.
            plain: variables of the module, e.g. a pretrained model's.
            args, kwargs: the model's inputs; arrays or `jax.ShapeDtypeStruct`s. Nothing is computed.

        Returns:
            plain's collections; its "params" are in "frozen", kernels that multiply under the recipe in the
            format that `LoRA.weight` says, and "params" holds the adapters, float32.

        Raises:
            ValueError: a pattern of the recipe's, a rule or a target matches no layer, or a target one that
                can have no adapters; a kernel is missing in `plain`, or has another shape.
        """
        own = shapes_of_call(lambda *a, **k: self.module.init(rngs, *a, **k), *args, **kwargs)
        given, expected = (shapes_of(by_path(collection("plain", each))) for each in (plain, own))
        check_same("plain", given, expected, "the module")
        return self._adapt(rngs, plain, *args, **kwargs)

    def _adapt(self, rngs: Any, plain: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        key = rngs[PARAMS] if isinstance(rngs, Mapping) else rngs
        others = {name: tree for name, tree in plain.items() if name not in OURS}
        adapt = functools.partial(self._function.adapt, key)
        new = self._planned(
            adapt, {PARAMS: plain[PARAMS], **others}, *args, **self._options(plain, rngs, kwargs)
        )
        new[FROZEN] = with_own_boxes(new[FROZEN])
        return {**others, **new}

    def merge(self, variables: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The untransformed module's variables, with the adapters in its kernels: W + (alpha / rank) A B.

        Args:
            variables: this model's.
            base: the untransformed module's variables that it started from; without them W is the frozen
                kernel, which the FP8 format has rounded.
        """
        plain = self._base(variables) if base is None else self._checked("base", base, variables)
        return {**plain, PARAMS: self._function.with_adapters(plain[PARAMS], variables[PARAMS])}

    def unmerge(self, merged: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
        """The way back: `merged` without the adapters of `variables`, W up to float32 rounding."""
        merged = self._checked("merged", merged, variables)
        return {**merged, PARAMS: self._function.with_adapters(merged[PARAMS], variables[PARAMS], -1.0)}

    def quantize(self, plain: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
        """Variables with another plain model's values below the adapters of `like`; see `LinenModel`."""
        new = super().quantize(plain, {PARAMS: collection("like", like, FROZEN)})
        return {**like, **new, PARAMS: like[PARAMS], FROZEN: new[PARAMS]}

    def dequantize(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """`merge(variables)`: what the untransformed module takes to compute the same, but for rounding."""
        return self.merge(variables)

    def freeze(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The variables: their kernels are as GEMMs take them."""
        del args, kwargs
        return dict(variables)

    def _checked(self, argument: str, plain: Any, variables: Any) -> dict[str, Any]:
        """Variables of the untransformed module, if they are what it started from or could have."""
        params = shapes_of(by_path(collection(argument, plain)))
        frozen = shapes_of(by_path(collection("variables", variables, FROZEN)))
        check_same(argument, params, frozen, "`variables`")
        return dict(plain)

    def _base(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        plain = {name: tree for name, tree in variables.items() if name not in OURS}
        frozen = collection("variables", variables, FROZEN)
        values = jax.tree.map(own_value, frozen, is_leaf=is_scaled)
        return {**plain, PARAMS: with_plain_boxes(values)}
