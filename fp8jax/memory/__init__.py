"""How much memory does a training step need? It is counted and simulated: no device is touched."""

from fp8jax.memory.planner import Plan as Plan
from fp8jax.memory.planner import fullest as fullest
from fp8jax.memory.planner import kinds_of as kinds_of
from fp8jax.memory.planner import plan as plan
from fp8jax.memory.planner import plan_step as plan_step
