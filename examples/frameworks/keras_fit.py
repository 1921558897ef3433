"""Keras 3 on JAX: `fit` of a small transformer.

Keras's `fit` calls the model by `stateless_call`, a function of a list of variables. So this function is
transformed. The variables' paths are its names, so that heads and embeddings are found.
"""

import os

import client

given = client.options(__doc__)
os.environ["KERAS_BACKEND"] = "jax"

import keras  # noqa: E402
import numpy as np  # noqa: E402

import fp8jax  # noqa: E402


def transformer() -> keras.Model:
    """A decoder of two blocks."""
    tokens = keras.Input((client.LENGTH,), dtype="int32")
    x = keras.layers.Embedding(client.VOCABULARY, client.WIDTH, name="embed")(tokens)
    for _ in range(2):
        normed = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(2, 32)(normed, normed, use_causal_mask=True)
        normed = keras.layers.LayerNormalization()(x)
        hidden = keras.layers.Dense(4 * client.WIDTH, activation="gelu")(normed)
        x = x + keras.layers.Dense(client.WIDTH)(hidden)
    return keras.Model(tokens, keras.layers.Dense(client.VOCABULARY, name="lm_head")(x))


def in_fp8(model, recipe):
    """The model with FP8 matmuls in `fit`, and the function that computes them."""
    paths, call = [v.path for v in model.trainable_variables], model.stateless_call
    fp8 = fp8jax.transform(lambda tree, *args, **kw: call([tree[p] for p in paths], *args, **kw), recipe)
    model.stateless_call = lambda params, *args, **kw: fp8.apply(
        dict(zip(paths, params, strict=True)), *args, **kw
    )
    return fp8


def loop(model, x, y):
    """The loop: Keras's own."""
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    last = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(logs["loss"]))
    losses: list[float] = []
    model.fit(x, y, client.BATCH, shuffle=False, verbose=0, callbacks=[last])
    return losses


def train(recipe, given):
    """See `client.main`."""
    keras.utils.set_random_seed(0)
    tokens = np.concatenate(client.batches(given.steps))
    model = transformer()
    fp8 = in_fp8(model, recipe)
    losses = loop(model, tokens[:, :-1], tokens[:, 1:])
    paths = [v.path for v in model.trainable_variables]
    params = [v.value for v in model.trainable_variables]
    report = fp8.report(
        dict(zip(paths, params, strict=True)),
        [v.value for v in model.non_trainable_variables],
        tokens[:16, :-1],
    )
    if recipe != "bf16":
        print(report)
    # `fit` logs the mean over the steps so far.
    return client.Trained(losses[-1] * given.steps - losses[-2] * (given.steps - 1), report.fp8_share)


if __name__ == "__main__":
    client.main("keras", train, given)
