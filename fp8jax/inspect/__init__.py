"""Programs of models, read without running them (chart, GEMMs, memory, time, devices), and a model's numbers.

| file | provides |
|---|---|
| `targets` | GPUs that are not here, to compile for |
| `program/` | GEMMs, collectives, kernels and memory of a compiled program |
| `chart` | the precision chart, read back from compiled train steps |
| `estimate/` | the time of a training step, estimated; its tables and picture |
| `report_check` | whether the GEMMs of a program are as the report says, layer by layer |
| `memory/` | the bytes of a training step |
| `numerics/` | statistics of tensors under recipes, and advice from them |
| `device` | formats of the GEMMs that the devices here compute natively |
| `subject`, `models`, `step` | models to inspect, and their training step |
| `tables` | tables as text |
"""

from fp8jax.inspect import chart as chart
from fp8jax.inspect import device as device
from fp8jax.inspect import estimate as estimate
from fp8jax.inspect import memory as memory
from fp8jax.inspect import models as models
from fp8jax.inspect import numerics as numerics
from fp8jax.inspect import program as program
from fp8jax.inspect import report_check as report_check
from fp8jax.inspect import step as step
from fp8jax.inspect import subject as subject
from fp8jax.inspect import tables as tables
from fp8jax.inspect import targets as targets
