"""The time of a training step on a GPU that is not here, estimated; and its tables and picture.

| file | provides |
|---|---|
| `time` | the time of each kernel of the compiled step, with bounds |
| `report` | estimates as tables, JSON and a picture |
"""

from fp8jax.inspect.estimate.time import Estimate as Estimate
from fp8jax.inspect.estimate.time import estimate as estimate
