"""Flax's context managers around a call, on which the trace of a model depends."""

from typing import Any

import flax.linen.module as linen_module
from flax.core.spmd import get_logical_axis_rules


def flax_context() -> tuple[Any, ...]:
    """The user's interceptors, for which Flax has no public name, and the rules of logical axes."""
    return *linen_module._global_interceptor_stack, repr(get_logical_axis_rules())
