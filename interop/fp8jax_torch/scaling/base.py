"""`Scaling`, the base of scaling methods: how the operands of a matmul are quantized for its GEMMs.

The operands are input (m, k), weight (k, n) and output gradient (m, n). Each takes part in two GEMMs, see
`fp8jax.scaling.base`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from fp8jax.recipe import Recipe
from fp8jax_torch.gemm import Operand

# For which of its two GEMMs an operand is needed, and an operand for each; None for a GEMM that is not used.
Uses = Sequence[bool]
Copies = list[Operand | None]


@dataclasses.dataclass(frozen=True)
class Scaling:
    """A scaling method with the options of a recipe.

        amax = scaling.amax(x)
        for_fprop, for_wgrad = scaling.quantize(state, LHS, x, amax, (True, True))
        state.record(amax, weight_amax, grad_amax)
        scaling.update(state)

    `state` is the `ScalingState` of a layer.

    Attributes:
        recipe: the layer's.
        weight_dtype: dtype of a weight's codes, with one scale, that both GEMMs of the weight read. The
            residual of the weight has these codes. None if each GEMM quantizes the weight: then the residual
            is the weight as it is stored.
    """

    recipe: Recipe
    weight_dtype: ClassVar[torch.dtype | None] = None

    def check_device(self, device: torch.device) -> None:
        """Raises RuntimeError for a device without GEMMs for this scaling."""

    def init(self, path: str) -> dict[str, torch.Tensor]:
        """The buffers of the first state of the layer at `path`."""
        return {}

    def amax(self, x: Operand) -> torch.Tensor | None:
        """The amax of an operand, float32, for the scales; None if no scale of a tensor depends on it."""

    def quantize(self, state: Any, operand: int, x: Operand, amax: Any, uses: Uses) -> Copies:
        """An operand for each of its two GEMMs; None for a GEMM that is not used.

        Args:
            state: the layer's.
            operand: `LHS`, `RHS` or `GRAD`.
            x: the operand in high precision, or a weight in `weight_dtype`.
            amax: its amax; None for a weight in `weight_dtype`.
            uses: for which GEMMs.
        """
        raise NotImplementedError

    def convert(self, state: Any, saved: Any, prefix: str) -> None:
        """Changes the saved buffers of a state dict, whose names have the prefix, to those of this recipe."""

    def update(self, state: Any) -> None:
        """Changes the buffers for the next step, by `state.recorded`."""
