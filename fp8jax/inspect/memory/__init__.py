"""How much memory does a training step need? Read from the compiled program; the step is not run.

| file | provides |
|---|---|
| `planner` | `plan`, `plan_step`, `plan_of`: the bytes of a step on one device |
| `state` | the bytes that stay between steps, by kind |
| `cache` | finished rows on disk |
| `subject` | models by name |
| `report` | plans as text |
| `paper` | FP8-LM's table |
| `advice` | dimensions that waste work |
"""

from fp8jax.inspect.memory.planner import Plan as Plan
from fp8jax.inspect.memory.planner import plan as plan
from fp8jax.inspect.memory.planner import plan_of as plan_of
from fp8jax.inspect.memory.planner import plan_step as plan_step
from fp8jax.inspect.memory.state import bytes_by_kind as bytes_by_kind
from fp8jax.inspect.memory.state import kinds_of as kinds_of
