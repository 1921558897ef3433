"""How much memory does a training step need? It is counted and simulated: no device is touched."""

from fp8jax.memory.plan import Plan as Plan
from fp8jax.memory.plan import fullest as fullest
from fp8jax.memory.plan import plan as plan
