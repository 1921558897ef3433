"""Mixture of experts for Flax Linen; see `fp8jax.adapters.moe`."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax.sharding import Mesh

from fp8jax.adapters.moe import exchange
from fp8jax.adapters.moe.routing import LOSSES, check, route
from fp8jax.dot import ExpertSharding

# Each expert's kernel as `nn.Dense` has it.
EXPERTS_INIT = nn.initializers.lecun_normal(batch_axis=(0,))
ROUTER_INIT = nn.initializers.lecun_normal()


class ExpertDense(nn.Module):
    """A dense layer without bias for each expert, on rows sorted by expert.

    Its kernel, "kernel", has shape (num_experts, in_features, features). Under a recipe it has a scaling
    state, and so scales, for each expert.

    Attributes:
        features: of the output.
        num_experts: how many kernels.
        dtype: of the computation; by default the promoted dtype of input and kernel.
        param_dtype: of the kernel.
        kernel_init: its initializer, of the kernel's shape.
        promote_dtype: casts input and kernel to one dtype, as in `nn.Dense`.
        ragged_dot: multiplies: `ragged_dot(rows, kernel, sizes, over)`.
        over: mesh axis over which the experts are split, if they are.
    """

    features: int
    num_experts: int
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = EXPERTS_INIT
    promote_dtype: Callable[..., Any] = promote_dtype
    ragged_dot: Callable[..., Any] = exchange.ragged_dot
    over: ExpertSharding | None = None

    @nn.compact
    def __call__(self, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        """(rows, in_features) and the number of each expert's rows to (rows, features)."""
        shape = (self.num_experts, rows.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        rows, kernel, _ = self.promote_dtype(rows, kernel, None, dtype=self.dtype)
        return self.ragged_dot(rows, kernel, sizes, over=self.over)


class ExpertRouter(nn.Module):
    """The logits of the experts, in float32 under any recipe: a small product whose errors move tokens."""

    num_experts: int
    kernel_init: Callable[..., Any] = ROUTER_INIT

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(tokens, width) to (tokens, num_experts) float32."""
        shape = (x.shape[-1], self.num_experts)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        return jnp.dot(x.astype(jnp.float32), jnp.asarray(kernel))


class MoE(nn.Module):
    """A feed-forward layer of experts, `top_k` of which see each token.

    Parameters: "router", "up", "down", and if `gated` "gate", each with a "kernel". The collection
    "intermediates", where it is mutable, gets `load_balance_loss`, `router_z_loss` and `load`
    (see `routing.Route`).

    Attributes:
        hidden_features: of each expert.
        num_experts: how many.
        top_k: experts of a token.
        activation: between up and down.
        gated: whether an expert is `down(activation(gate(x)) * up(x))`, not `down(activation(up(x)))`.
        dtype: of the experts' computation; by default the promoted dtype of input and kernels.
        param_dtype: of the experts' kernels. The router's is float32.
        kernel_init: of the experts' kernels, shape=(num_experts, in, out).
        router_init: of the router's.
        mesh: given, experts and tokens are split over the devices of one of its axes.
        expert_axis: the name of that axis.
    """

    hidden_features: int
    num_experts: int
    top_k: int = 2
    activation: Callable[[jax.Array], jax.Array] = nn.gelu
    gated: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = EXPERTS_INIT
    router_init: Callable[..., Any] = ROUTER_INIT
    mesh: Mesh | None = None
    expert_axis: str = "expert"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., width) to the same shape.

        Raises:
            ValueError: `top_k` is more than the experts, or experts or tokens do not divide by the
                devices.
        """
        check(self.num_experts, self.top_k)
        over = None if self.mesh is None else ExpertSharding(self.mesh, self.expert_axis)
        tokens = x.reshape(-1, x.shape[-1])
        logits = ExpertRouter(self.num_experts, self.router_init, name="router")(tokens)
        chosen = route(logits, self.top_k)
        for name in (*LOSSES, "load"):
            self.sow("intermediates", name, getattr(chosen, name))

        def dense(features: int, name: str) -> ExpertDense:
            numbers = (self.dtype, self.param_dtype, self.kernel_init)
            return ExpertDense(features, self.num_experts, *numbers, over=over, name=name)

        rows, sizes, way = exchange.send(tokens, chosen.experts, self.num_experts, over)
        hidden = dense(self.hidden_features, "up")(rows, sizes)
        if self.gated:
            hidden = self.activation(dense(self.hidden_features, "gate")(rows, sizes)) * hidden
        else:
            hidden = self.activation(hidden)
        out = dense(x.shape[-1], "down")(hidden, sizes)
        return exchange.bring_back(out, chosen.gates, way, over).astype(out.dtype).reshape(x.shape)
