"""Gradients of a loss with respect to variables, gradient accumulation, and the application of updates.

    loss, grads, variables = fp8jax.value_and_grad(loss_fn)(variables, batch)
    updates, opt_state = tx.update(grads, opt_state, variables["params"])
    variables = fp8jax.apply_updates(variables, updates)

`variables` are Flax variables, `{"params": ..., "_overwrite_with_gradient": ...}`, or a tree of parameters.
`grads` is a tree like the parameters and nothing else, in the format of the recipe's `weight_grad` column.
The variables that come back have the new scaling state and loss scale.
"""

from fp8jax.gradients.accumulate import accumulate_gradients as accumulate_gradients
from fp8jax.gradients.loss import value_and_grad as value_and_grad
from fp8jax.gradients.updates import apply_updates as apply_updates
from fp8jax.gradients.updates import tree_map as tree_map
