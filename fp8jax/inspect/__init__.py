"""What a program will do, read from the compiled program: chart, GEMMs, memory and devices.

| file | provides |
|---|---|
| `targets` | GPUs that are not here, to compile for |
| `program/` | GEMMs, collectives, kernels and memory of a compiled program |
| `chart` | the precision chart, read back from compiled train steps |
| `gemms` | the GEMMs of a model, layer by layer, next to its report |
| `memory/` | the bytes of a training step |
| `machine` | formats that the devices here multiply natively |
| `models` | models to look at a recipe with |
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8jax.inspect import chart as chart
    from fp8jax.inspect import gemms as gemms
    from fp8jax.inspect import machine as machine
    from fp8jax.inspect import memory as memory
    from fp8jax.inspect import models as models
    from fp8jax.inspect import program as program
    from fp8jax.inspect import targets as targets

_ON_DEMAND = ("chart", "gemms", "machine", "memory", "models", "program", "targets")


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        return importlib.import_module(f"fp8jax.inspect.{name}")
    raise AttributeError(f"module 'fp8jax.inspect' has no attribute {name!r}")
