"""JAX's own gradient of whole variables, with the scaling state taken out of it as users do."""

import functools

import jax


def value_and_grad(loss_fn):
    """`(loss, grads, variables)`, as `fp8jax.value_and_grad` returns them."""

    @functools.wraps(loss_fn)
    def run(variables, *args):
        loss, grads = jax.value_and_grad(loss_fn)(variables, *args)
        new = {name: grads[name] for name in grads if name == "_overwrite_with_gradient"}
        return loss, grads["params"], {**variables, **new}

    return run
