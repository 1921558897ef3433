"""Reading programs: GEMMs, collectives, kernels and memory.

| file | provides |
|---|---|
| `compiled` | `read`: GEMMs, collectives, kernels and memory of a compiled program |
| `lowered` | `read_lowered`: GEMMs of a program that XLA has not optimized yet |
| `gemms` | `Gemm`, `gemm_of`: the GEMM of an instruction |
| `hlo` | HLO text, parsed |
"""

from fp8jax.inspect.program.compiled import Collective as Collective
from fp8jax.inspect.program.compiled import CompiledProgram as CompiledProgram
from fp8jax.inspect.program.compiled import Launch as Launch
from fp8jax.inspect.program.compiled import read as read
from fp8jax.inspect.program.gemms import Gemm as Gemm
from fp8jax.inspect.program.lowered import read_lowered as read_lowered
