"""FP8 training for JAX and Flax as pure functions.

model = fp8jax.transform(model, recipe)
tx = optax.chain(..., fp8jax.optim.adamw(3e-4, recipe))
"""

import importlib
from typing import TYPE_CHECKING, Any

from fp8jax import adapters as adapters
from fp8jax import comm as comm
from fp8jax import dot as dot
from fp8jax import formats as formats
from fp8jax import optim as optim
from fp8jax.adapters import accumulate_gradients as accumulate_gradients
from fp8jax.adapters import report as report
from fp8jax.adapters import transform as transform
from fp8jax.adapters import value_and_grad as value_and_grad
from fp8jax.adapters.linen import TrainState as TrainState
from fp8jax.gradients import apply_updates as apply_updates
from fp8jax.quantization import ScaledArray as ScaledArray
from fp8jax.quantization import quantize as quantize
from fp8jax.recipe import Recipe as Recipe
from fp8jax.rewrite import LoRA as LoRA
from fp8jax.rewrite import Rule as Rule

if TYPE_CHECKING:
    from fp8jax import checkpoints as checkpoints
    from fp8jax import inspect as inspect
    from fp8jax import train as train
    from fp8jax.inspect.numerics import advise as advise
    from fp8jax.inspect.numerics import statistics as statistics

__version__ = "0.2.0.dev0"

# Imported when they are asked for: they take time, or packages of the extra `train`.
_ON_DEMAND = {
    "checkpoints": "fp8jax.checkpoints",
    "inspect": "fp8jax.inspect",
    "train": "fp8jax.train",
    "advise": "fp8jax.inspect.numerics",
    "statistics": "fp8jax.inspect.numerics",
}


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        module = importlib.import_module(_ON_DEMAND[name])
        return module if _ON_DEMAND[name] == f"fp8jax.{name}" else getattr(module, name)
    raise AttributeError(f"module 'fp8jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_DEMAND})
