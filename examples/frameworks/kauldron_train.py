"""Kauldron: `kd.train.Trainer` of a small transformer.

Kauldron wants a Linen module as its model and reads the `kontext.Key`s of the module's class. So the class in
FP8 is a subclass with the `apply` of the transformed module.
"""

import client

given = client.options(__doc__, client.OPTIMIZER)

import logging  # noqa: E402
import tempfile  # noqa: E402

import flax.linen as nn  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from kauldron import kd  # noqa: E402

import fp8jax  # noqa: E402


class Transformer(nn.Module):
    """A decoder of two blocks."""

    tokens: kd.kontext.Key = kd.kontext.REQUIRED

    @nn.compact
    def __call__(self, tokens):  # noqa: D102
        mask = nn.make_causal_mask(tokens)
        x = nn.Embed(client.VOCABULARY, client.WIDTH)(tokens)
        for _ in range(2):
            x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x), mask=mask)
            x = x + nn.Dense(client.WIDTH)(nn.gelu(nn.Dense(4 * client.WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(client.VOCABULARY, name="lm_head")(x)


def in_fp8(model, recipe):
    """The module with FP8 matmuls, and the transformed module."""
    fp8 = fp8jax.transform(model, recipe)
    kind = type(model)
    InFP8 = type(kind.__name__, (kind,), {"apply": staticmethod(fp8.apply)})
    model = InFP8(tokens=model.tokens)
    return model, fp8


def loop(model, optimizer, data, steps):
    """The loop: Kauldron's own. It takes one step more than `num_train_steps`."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = kd.train.Trainer(
            workdir=folder,
            train_ds=data,
            model=model,
            num_train_steps=steps - 1,
            train_losses={
                "xent": kd.losses.SoftmaxCrossEntropyWithIntLabels(logits="preds", labels="batch.labels")
            },
            optimizer=optimizer,
            log_metrics_every=steps - 1,
            writer=kd.train.metric_writer.NoopWriter(),
        )
        _, aux = trainer.train()
    return float(aux.compute(flatten=False).loss_values["xent"])


def train(recipe, given):
    """See `client.main`."""
    logging.disable()
    tokens = np.concatenate(client.batches(given.steps))
    data = kd.data.InMemoryPipeline(
        loader=lambda: {"tokens": tokens[:, :-1], "labels": tokens[:, 1:, None]},
        batch_size=client.BATCH,
        num_epochs=1,
    )
    model, fp8 = in_fp8(Transformer(tokens="batch.tokens"), recipe)
    optimizer = optax.adamw(3e-3)
    if given.optimizer:
        optimizer = fp8jax.optim.adamw(3e-3, given.optimizer)
    loss = loop(model, optimizer, data, given.steps)
    report = fp8.report(jnp.zeros((client.BATCH, client.LENGTH), jnp.int32))
    if recipe != "bf16":
        print(report)
    return client.Trained(loss, report.fp8_share)


if __name__ == "__main__":
    client.main("kauldron", train, given)
