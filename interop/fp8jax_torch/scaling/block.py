"""Block scaling: a scale for each block, and codes for each GEMM; see `fp8jax.scaling.block`."""

from typing import Any

import numpy as np
import torch

from fp8jax import scaling
from fp8jax.quantization import BlockMethod, fp4
from fp8jax.scaling import GRAD, RHS, eden, seeds
from fp8jax_torch import blocks, casts
from fp8jax_torch.gemm import Operand
from fp8jax_torch.random import leaf_seed, random_bits
from fp8jax_torch.scaling.base import Copies, Scaling, Uses


class BlockScaling(Scaling):
    """Block scaling.

    The buffer of the state, of nvfp4 with stochastic rounding:
        key: shape=(2,), float32: a seed, and the number of steps; see `fp8jax.scaling.seeds`.
    """

    def check_device(self, device: torch.device) -> None:
        """No block-scaled GEMM of torch was tried on a GPU."""
        if device.type not in ("cpu", "meta"):
            raise RuntimeError(
                "`recipe`: block scaling on torch runs on a CPU, emulated exactly, and has no GEMMs for "
                f'GPUs; got {device.type}. Use the recipe "te,scaling=current", or backend="torchao" with '
                "mxfp8, nvfp4 or block,scaling=block_float32."
            )

    def init(self, path: str) -> dict[str, torch.Tensor]:
        """See `Scaling`."""
        # The weight's path in a Flax model of the same names, which has the same seeds.
        state = seeds.with_seeds(scaling.of_recipe(self.recipe).init(), f"{path}/kernel".lstrip("/"))
        return {name: torch.tensor(np.asarray(array)) for name, array in state.items()}

    def quantize(self, state: Any, operand: int, x: Operand, amax: Any, uses: Uses) -> Copies:
        """Copies with the contracted axis last, padded to whole blocks, as `fp8jax.scaling.block`'s."""
        self.check_device(x.data.device)
        return [self._copy(state, operand, x, use) if uses[use] else None for use in (0, 1)]

    def _copy(self, state: Any, operand: int, x: Operand, use: int) -> Operand:
        its: Any = scaling.of_recipe(self.recipe)
        method, options = its.method(operand, use), self.recipe.fp4_options
        if method.rule == "eden":
            return _eden(state, operand, x, use, method)
        copy, random = blocks.padded(x.contracted_last(operand, use).data, method), None
        if self.recipe.gemm == "FP4" and use == 1 and operand != RHS and "hadamard" in options:
            copy = blocks.hadamard(copy)
        if operand == GRAD and "key" in state._buffers:
            seed, step = map(int, state.key)
            of_tensor = int(casts.amax(x.data).view(torch.int32))
            random = random_bits(leaf_seed((seed << 32) + of_tensor, step, use), 0, copy)
        return blocks.quantize_blocks(copy, method, random)

    def update(self, state: Any) -> None:
        """Counts the step."""
        state.key[1] += 1


def _eden(state: Any, operand: int, x: Operand, use: int, method: BlockMethod) -> Operand:
    """`fp8jax.scaling.eden.quantize_operand`."""
    seed, step = map(int, state.key)
    copy = blocks.padded(x.contracted_last(operand, use).data, method, fp4.ROTATION)
    bits = random_bits(
        leaf_seed(seed << 32, step, eden.of_signs(operand, use)), 0, copy.new_empty(fp4.ROTATION)
    )
    copy = blocks.rotated(copy, torch.where(bits < 0, -1.0, 1.0))
    of_tensor = int(casts.amax(x.data).view(torch.int32))
    of_scales = copy.new_empty(len(copy), copy.shape[1] // method.block[1])
    random = random_bits(
        leaf_seed((seed << 32) + of_tensor, step, eden.of_scales(operand, use)), 0, of_scales
    )
    return blocks.quantize_blocks(copy, method, random)
