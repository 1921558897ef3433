"""Variables in, variables out: the loss's gradient, and a step along it.

    loss, grads = fp8jax.value_and_grad(loss_fn)(variables, batch)
    updates, opt_state = tx.update(grads, opt_state, variables)
    variables = fp8jax.apply_updates(variables, updates)

`variables` are Flax's: `{"params": ..., "_overwrite_with_gradient": ...}`. The gradient has
the same structure: under "params" the gradients, in the format that the recipe's
`weight_grad` column names, under "_overwrite_with_gradient" the new scaling state, which
replaces the old one, as a new "loss_scale" does. A tree without a "params" collection is
taken as the parameters.
"""

from fp8jax.gradients.accumulate import accumulate_gradients as accumulate_gradients
from fp8jax.gradients.loss import value_and_grad as value_and_grad
from fp8jax.gradients.updates import apply_updates as apply_updates
