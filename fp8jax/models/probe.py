"""A model to look at a recipe with: what a transformer's block has, and nothing else."""

import flax.linen as nn
import jax


class Block(nn.Module):
    """Layer norm, a dense layer four times as wide, gelu, a dense layer back, residual."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(tokens, width) -> the same."""
        y = nn.LayerNorm(dtype=x.dtype)(x)
        y = nn.gelu(nn.Dense(4 * self.width, name="up", dtype=x.dtype)(y))
        return x + nn.Dense(self.width, name="down", dtype=x.dtype)(y)
