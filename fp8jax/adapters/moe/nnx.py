"""Mixture of experts for Flax NNX; see `fp8jax.adapters.moe`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax.sharding import Mesh

from fp8jax.adapters.moe import exchange
from fp8jax.adapters.moe.linen import EXPERTS_INIT, ROUTER_INIT
from fp8jax.adapters.moe.routing import LOSSES, check, route
from fp8jax.dot import ExpertSharding


class Routed(nnx.Variable):
    """What a router's last call says of itself: a loss, or the experts' load."""


class ExpertDense(nnx.Module):
    """A dense layer without bias for each expert, on rows sorted by expert.

    Args:
        in_features: of the input.
        out_features: of the output.
        num_experts: how many kernels; `kernel` has shape (num_experts, in_features, out_features).
        dtype, param_dtype, kernel_init, over: see `fp8jax.adapters.moe.linen.ExpertDense`.
        rngs: for the kernels.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_experts: int,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = EXPERTS_INIT,
        over: ExpertSharding | None = None,
        rngs: nnx.Rngs,
    ):
        shape = (num_experts, in_features, out_features)
        self.kernel = nnx.Param(kernel_init(rngs.params(), shape, param_dtype))
        self.dtype, self.param_dtype, self.over = dtype, param_dtype, over
        self.promote_dtype, self.ragged_dot = promote_dtype, exchange.ragged_dot

    def __call__(self, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        """(rows, in_features) and the number of each expert's rows to (rows, out_features)."""
        rows, kernel, _ = self.promote_dtype((rows, self.kernel[...], None), dtype=self.dtype)
        return self.ragged_dot(rows, kernel, sizes, over=self.over)


class ExpertRouter(nnx.Module):
    """The logits of the experts, in float32 under any recipe: a small product whose errors move tokens."""

    def __init__(self, features: int, num_experts: int, kernel_init: Callable[..., Any], rngs: nnx.Rngs):
        self.kernel = nnx.Param(kernel_init(rngs.params(), (features, num_experts), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """(tokens, width) to (tokens, num_experts) float32."""
        return jnp.dot(x.astype(jnp.float32), jnp.asarray(self.kernel[...]))


class MoE(nnx.Module):
    """A feed-forward layer of experts, `top_k` of which see each token.

    Parts: `router`, `up`, `down`, and if `gated` `gate`, each with a `kernel`. A call leaves
    `load_balance_loss`, `router_z_loss` and `load` (see `routing.Route`) in `Routed` variables, as a
    BatchNorm leaves its statistics: those of the last call.

    Args:
        in_features: the width of tokens.
        hidden_features, num_experts, top_k, activation, gated, dtype, param_dtype, kernel_init,
            router_init, mesh, expert_axis: see `fp8jax.adapters.moe.linen.MoE`.
        keep_losses: whether calls leave them. Without, a call changes nothing, and so may stand in a
            trace that the module does not belong to, e.g. a `jax.jit` that closes over it.
        rngs: for the kernels.

    Raises:
        ValueError: `top_k` is not between 1 and the number of experts.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        num_experts: int,
        top_k: int = 2,
        *,
        activation: Callable[[jax.Array], jax.Array] = nnx.gelu,
        gated: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = EXPERTS_INIT,
        router_init: Callable[..., Any] = ROUTER_INIT,
        mesh: Mesh | None = None,
        expert_axis: str = "expert",
        keep_losses: bool = True,
        rngs: nnx.Rngs,
    ):
        check(num_experts, top_k)
        over = None if mesh is None else ExpertSharding(mesh, expert_axis)

        def dense(in_features: int, out_features: int) -> ExpertDense:
            numbers = {"dtype": dtype, "param_dtype": param_dtype, "kernel_init": kernel_init}
            return ExpertDense(in_features, out_features, num_experts, **numbers, over=over, rngs=rngs)

        self.num_experts, self.top_k, self.activation, self.gated = num_experts, top_k, activation, gated
        self.keep_losses, self.over = keep_losses, over
        self.router = ExpertRouter(in_features, num_experts, router_init, rngs)
        self.up = dense(in_features, hidden_features)
        if gated:
            self.gate = dense(in_features, hidden_features)
        self.down = dense(hidden_features, in_features)
        for name in LOSSES:
            setattr(self, name, Routed(jnp.zeros((), jnp.float32)))
        self.load = Routed(jnp.zeros(num_experts, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., width) to the same shape.

        Raises:
            ValueError: experts or tokens do not divide by the devices.
        """
        tokens = x.reshape(-1, x.shape[-1])
        chosen = route(self.router(tokens), self.top_k)
        for name in (*LOSSES, "load") if self.keep_losses else ():
            getattr(self, name).set_value(getattr(chosen, name))
        rows, sizes, way = exchange.send(tokens, chosen.experts, self.num_experts, self.over)
        hidden = self.up(rows, sizes)
        hidden = self.activation(self.gate(rows, sizes)) * hidden if self.gated else self.activation(hidden)
        out = self.down(hidden, sizes)
        return exchange.bring_back(out, chosen.gates, way, self.over).astype(out.dtype).reshape(x.shape)


def losses_of(model: nnx.Module) -> dict[str, list[Any]]:
    """The losses that the layers' last calls left."""
    layers = [layer for _, layer in nnx.iter_modules(model) if isinstance(layer, MoE)]
    return {name: [getattr(layer, name).get_value() for layer in layers] for name in LOSSES}
