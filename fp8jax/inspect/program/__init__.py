"""Reading programs: GEMMs, collectives, kernels, memory and traffic.

| file | provides |
|---|---|
| `compiled` | `read`: GEMMs, collectives, kernels and memory of a compiled program |
| `lowered` | `read_lowered`: GEMMs of a program that XLA has not optimized yet |
| `traffic` | `traffic_of`: bytes that kernels move, casts and transposes |
| `hlo` | HLO text, parsed |
"""

from fp8jax.inspect.program.compiled import Collective as Collective
from fp8jax.inspect.program.compiled import Gemm as Gemm
from fp8jax.inspect.program.compiled import Kernel as Kernel
from fp8jax.inspect.program.compiled import Program as Program
from fp8jax.inspect.program.compiled import read as read
from fp8jax.inspect.program.lowered import read_lowered as read_lowered
from fp8jax.inspect.program.traffic import Traffic as Traffic
from fp8jax.inspect.program.traffic import traffic_of as traffic_of
