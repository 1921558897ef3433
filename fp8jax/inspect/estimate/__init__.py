"""The time of a training step on a GPU that is not here, estimated; and its tables and picture.

| file | provides |
|---|---|
| `time` | the time of each kernel of the compiled step, with bounds |
| `report` | estimates as tables, JSON and a picture |
"""

from fp8jax.inspect.estimate.time import BEST as BEST
from fp8jax.inspect.estimate.time import GRADIENTS as GRADIENTS
from fp8jax.inspect.estimate.time import LIKELY as LIKELY
from fp8jax.inspect.estimate.time import PARTS as PARTS
from fp8jax.inspect.estimate.time import WORST as WORST
from fp8jax.inspect.estimate.time import Cost as Cost
from fp8jax.inspect.estimate.time import Efficiency as Efficiency
from fp8jax.inspect.estimate.time import Estimate as Estimate
from fp8jax.inspect.estimate.time import estimate as estimate
from fp8jax.inspect.estimate.time import of_program as of_program
