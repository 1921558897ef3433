"""Gradients of a loss with respect to variables, gradient accumulation, and the application of updates.

    loss, grads = fp8jax.value_and_grad(loss_fn)(variables, batch)
    updates, opt_state = tx.update(grads, opt_state, variables)
    variables = fp8jax.apply_updates(variables, updates)

`variables` are Flax variables, `{"params": ..., "_overwrite_with_gradient": ...}`, or a tree of parameters.
The gradient has the same structure. "params" has the gradients, in the format of the recipe's `weight_grad`
column. "_overwrite_with_gradient" has the new scaling state and "loss_scale" the new loss scale; both replace
the old ones.
"""

from fp8jax.gradients.accumulate import accumulate_gradients as accumulate_gradients
from fp8jax.gradients.loss import value_and_grad as value_and_grad
from fp8jax.gradients.updates import apply_updates as apply_updates
