"""Levanter: its `Trainer` of a small Llama of Haliax's named arrays."""

import client

given = client.options(__doc__, client.OPTIMIZER)

import haliax as hax  # noqa: E402
import jax  # noqa: E402
import optax  # noqa: E402
from levanter.models.llama import LlamaConfig, LlamaLMHeadModel  # noqa: E402
from levanter.models.lm_model import LmExample, compute_next_token_loss  # noqa: E402
from levanter.tracker import NoopConfig  # noqa: E402
from levanter.trainer import Trainer, TrainerConfig  # noqa: E402

import fp8jax  # noqa: E402


def loop(model, loss_fn, optimizer, data, steps):
    """The loop: Levanter's own."""
    config = TrainerConfig(
        train_batch_size=client.BATCH,
        num_train_steps=steps,
        tracker=NoopConfig(),
        id="fp8",
        log_jaxprs=False,
        log_xla_hlo=False,
    )
    with Trainer(config, optimizer, loss_fn, add_default_hooks=False) as trainer:
        state = trainer.initial_state(jax.random.key(0), model=model)
        for batch in data:
            info = trainer.train_step(state, batch)
            state = info.state
    return info.loss


def train(recipe, given):
    """See `client.main`."""
    config = LlamaConfig(
        seq_len=client.LENGTH + 1, hidden_dim=client.WIDTH, intermediate_dim=4 * client.WIDTH, num_layers=2,
        num_heads=2, num_kv_heads=2,
    )  # fmt: skip
    model = LlamaLMHeadModel.init(hax.Axis("vocab", client.VOCABULARY), config, key=jax.random.key(0))
    example = hax.vmap(LmExample.causal, "batch")
    axes = hax.Axis("batch", client.BATCH), config.Pos
    data = [example(hax.named(tokens, axes)) for tokens in client.batches(given.steps)]

    def next_token_loss(model, example, key=None):
        losses = compute_next_token_loss(model, example, key=key, reduction=None)
        return hax.mean(losses).scalar()

    fp8 = fp8jax.transform(next_token_loss, recipe)

    def loss_fn(model, example, key=None):
        return fp8.apply(model, example, key)

    optimizer = optax.adamw(3e-3)
    if given.optimizer:
        optimizer = fp8jax.optim.adamw(3e-3, given.optimizer)
    loss = loop(model, loss_fn, optimizer, data, given.steps)
    report = fp8.report(model, data[0], None)
    if recipe != "bf16":
        print(report)
    return client.Trained(float(loss), report.fp8_share)


if __name__ == "__main__":
    client.main("levanter", train, given)
