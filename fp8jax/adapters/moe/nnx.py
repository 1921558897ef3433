"""Mixture of experts for Flax NNX; see `fp8jax.adapters.moe`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Shaped

from fp8jax.adapters.moe.exchange import feed_forward
from fp8jax.adapters.moe.linen import EXPERTS_INIT, ROUTER_INIT
from fp8jax.adapters.moe.routing import LOSSES, check, route
from fp8jax.dot import ExpertSharding, high_precision_ragged_dot


class Routed(nnx.Variable):
    """A value of a router's last call: a loss, or the experts' load."""


class ExpertDense(nnx.Module):
    """A dense layer without bias for each expert, on rows sorted by expert.

    Its `kernel` has shape (num_experts, in_features, out_features).

    Args:
        in_features: input features.
        out_features: output features.
        num_experts: number of kernels.
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
        self.dtype, self.over = dtype, over

    def __call__(
        self, rows: Float[Array, "rows in_features"], sizes: Int[Array, " num_experts"]
    ) -> Float[Array, "rows out_features"]:
        """The outputs of the rows, of which the first `sizes[0]` belong to the first expert, and so on."""
        rows, kernel = promote_dtype((rows, self.kernel[...]), dtype=self.dtype)
        return high_precision_ragged_dot(rows, kernel, sizes, over=self.over)


class ExpertRouter(nnx.Module):
    """The experts' logits, in float32 under any recipe: a small matmul, but its errors move tokens."""

    def __init__(self, features: int, num_experts: int, kernel_init: Callable[..., Any], rngs: nnx.Rngs):
        self.kernel = nnx.Param(kernel_init(rngs.params(), (features, num_experts), jnp.float32))

    def __call__(self, x: Float[Array, "tokens width"]) -> Float[Array, "tokens num_experts"]:
        """The float32 logits."""
        return jnp.dot(x.astype(jnp.float32), jnp.asarray(self.kernel[...]))


class MoE(nnx.Module):
    """A feed-forward layer of experts, `top_k` of which see each token.

    Layers: `router`, `up`, `down`, and if `gated` `gate`, each with a `kernel`. A call leaves
    `load_balance_loss`, `router_z_loss` and `load` (see `Route`) in `Routed` variables, as a BatchNorm leaves
    its statistics.

    Args:
        in_features: the width of tokens.
        hidden_features, num_experts, top_k, activation, gated: see `fp8jax.adapters.moe.linen.MoE`.
        dtype, param_dtype, kernel_init, router_init, mesh, expert_axis: see the same.
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
        rngs: nnx.Rngs,
    ):
        check(num_experts, top_k)
        over = None if mesh is None else ExpertSharding(mesh, expert_axis)

        def dense(in_features: int, out_features: int) -> ExpertDense:
            options = {"dtype": dtype, "param_dtype": param_dtype, "kernel_init": kernel_init}
            return ExpertDense(in_features, out_features, num_experts, over=over, rngs=rngs, **options)

        self.num_experts, self.top_k, self.activation, self.over = num_experts, top_k, activation, over
        self.router = ExpertRouter(in_features, num_experts, router_init, rngs)
        self.up = dense(in_features, hidden_features)
        self.gate = dense(in_features, hidden_features) if gated else None
        self.down = dense(hidden_features, in_features)
        for name in LOSSES:
            setattr(self, name, Routed(jnp.zeros((), jnp.float32)))
        self.load = Routed(jnp.zeros(num_experts, jnp.float32))

    def __call__(self, x: Shaped[Array, "*batch width"]) -> Shaped[Array, "*batch width"]:
        """The sum of the outputs of each token's experts times their gates.

        Raises:
            ValueError: experts or tokens are not divisible by the number of devices.
        """
        chosen = route(self.router(x.reshape(-1, x.shape[-1])), self.top_k)
        for name in (*LOSSES, "load"):
            getattr(self, name).set_value(getattr(chosen, name))
        return feed_forward(x, chosen, self.up, self.gate, self.down, self.activation, self.over)
