"""Will it train in FP8 here? What the machine has, and what became of a model on it.

| room | question |
|---|---|
| `machine` | what does the machine multiply, and what is missing? |
| `gemms` | does a compiled program do what the report says? |
"""

from fp8jax.doctor.gemms import check as check
from fp8jax.doctor.machine import examine as examine
