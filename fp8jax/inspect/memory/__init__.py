"""Memory of a training step, read from its compiled program; the step does not run.

| file | provides |
|---|---|
| `planner` | `plan`, `plan_step`, `plan_of`: bytes of a step on one device |
| `fitting` | `fit`: the ZeRO stage and the batch that fit a GPU |
| `cache` | figures of programs on disk |
| `advice` | dimensions that waste work |
"""

from fp8jax.inspect.memory.fitting import Fit as Fit
from fp8jax.inspect.memory.fitting import fit as fit
from fp8jax.inspect.memory.planner import MemoryPlan as MemoryPlan
from fp8jax.inspect.memory.planner import plan as plan
from fp8jax.inspect.memory.planner import plan_of as plan_of
from fp8jax.inspect.memory.planner import plan_step as plan_step
from fp8jax.inspect.memory.planner import table as table
