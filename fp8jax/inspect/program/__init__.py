"""What a program is made of, read from its text.

The files: `compiled` (GEMMs, collectives, memory), `traffic` (what its kernels read, write, cast and
transpose), `text` (the text of a program, taken apart).
"""

from fp8jax.inspect.program.compiled import Collective as Collective
from fp8jax.inspect.program.compiled import Gemm as Gemm
from fp8jax.inspect.program.compiled import Program as Program
from fp8jax.inspect.program.compiled import read as read
from fp8jax.inspect.program.compiled import read_lowered as read_lowered
from fp8jax.inspect.program.traffic import Kernel as Kernel
from fp8jax.inspect.program.traffic import Traffic as Traffic
from fp8jax.inspect.program.traffic import traffic_of as traffic_of
