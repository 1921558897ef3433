"""Mixture of experts for Flax Linen; see `fp8jax.adapters.moe`."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Shaped

from fp8jax.adapters.moe.exchange import feed_forward
from fp8jax.adapters.moe.routing import LOSSES, check, route
from fp8jax.dot import ExpertSharding, high_precision_ragged_dot

EXPERTS_INIT = nn.initializers.lecun_normal(batch_axis=(0,))  # for each expert as in `nn.Dense`
ROUTER_INIT = nn.initializers.lecun_normal()


class ExpertDense(nn.Module):
    """A dense layer without bias for each expert, on rows sorted by expert.

    Its parameter "kernel" has shape (num_experts, in_features, features). Under a recipe each expert has its
    own scaling state.

    Attributes:
        features: output features.
        num_experts: number of kernels.
        dtype: dtype of the computation; None is the promoted dtype of input and kernel.
        param_dtype: dtype of the kernel.
        kernel_init: initializer of the kernel.
        over: the mesh axis that shards the experts, if any.
    """

    features: int
    num_experts: int
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = EXPERTS_INIT
    over: ExpertSharding | None = None

    @nn.compact
    def __call__(
        self, rows: Float[Array, "rows in_features"], sizes: Int[Array, " num_experts"]
    ) -> Float[Array, "rows features"]:
        """The outputs of the rows, of which the first `sizes[0]` belong to the first expert, and so on."""
        shape = (self.num_experts, rows.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        rows, kernel = promote_dtype(rows, kernel, dtype=self.dtype)
        return high_precision_ragged_dot(rows, kernel, sizes, over=self.over)


class ExpertRouter(nn.Module):
    """The experts' logits, in float32 under any recipe: a small matmul, but its errors move tokens."""

    num_experts: int
    kernel_init: Callable[..., Any] = ROUTER_INIT

    @nn.compact
    def __call__(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens num_experts"]:
        """The float32 logits."""
        shape = (x.shape[-1], self.num_experts)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        return jnp.dot(x.astype(jnp.float32), jnp.asarray(kernel))


class MoE(nn.Module):
    """A feed-forward layer of experts, `top_k` of which see each token.

    Parameters: "router", "up", "down", and if `gated` "gate", each with a "kernel". The collection
    "intermediates", if mutable, gets `load_balance_loss`, `router_z_loss` and `load` (see `Route`).

    Attributes:
        hidden_features: hidden features of each expert.
        num_experts: number of experts.
        top_k: experts of a token.
        activation: function between up and down.
        gated: whether an expert is `down(activation(gate(x)) * up(x))`, not `down(activation(up(x)))`.
        dtype: dtype of the experts' computation; None is the promoted dtype of input and kernels.
        param_dtype: dtype of the experts' kernels. The router's kernel is float32.
        kernel_init: initializer of the experts' kernels, shape=(num_experts, in, out).
        router_init: initializer of the router's kernel.
        mesh: if given, experts and tokens are sharded over the devices of one of its axes.
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
    def __call__(self, x: Shaped[Array, "*batch width"]) -> Shaped[Array, "*batch width"]:
        """The sum of the outputs of each token's experts times their gates.

        Raises:
            ValueError: `top_k` exceeds the number of experts, or experts or tokens are not divisible by the
                number of devices.
        """
        check(self.num_experts, self.top_k)
        over = None if self.mesh is None else ExpertSharding(self.mesh, self.expert_axis)
        logits = ExpertRouter(self.num_experts, self.router_init, name="router")(x.reshape(-1, x.shape[-1]))
        chosen = route(logits, self.top_k)
        for name in (*LOSSES, "load"):
            self.sow("intermediates", name, getattr(chosen, name))

        def dense(features: int, name: str) -> ExpertDense:
            options = {"dtype": self.dtype, "param_dtype": self.param_dtype, "kernel_init": self.kernel_init}
            return ExpertDense(features, self.num_experts, over=over, name=name, **options)

        up, down = dense(self.hidden_features, "up"), dense(x.shape[-1], "down")
        gate = dense(self.hidden_features, "gate") if self.gated else None
        return feed_forward(x, chosen, up, gate, down, self.activation, over)
