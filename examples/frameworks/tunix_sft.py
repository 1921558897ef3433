"""tunix: `PeftTrainer` of a small Llama, all parameters or LoRA."""

import client

given = client.options(__doc__, client.OPTIMIZER, client.LORA)

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
import qwix  # noqa: E402
from flax import nnx  # noqa: E402
from tunix.models.llama3 import model as llama  # noqa: E402
from tunix.sft import hooks, peft_trainer, utils  # noqa: E402

import fp8jax  # noqa: E402


class Losses(hooks.TrainingHooks):
    """Collects the losses."""

    def __init__(self):
        self.values: list[float] = []

    def on_train_step_end(self, train_ctx, train_step, train_loss):  # noqa: D102
        self.values.append(float(train_loss))

    on_train_start = on_train_end = on_train_step_start = lambda *args: None
    on_eval_step_start = on_eval_step_end = lambda *args: None


def inputs(example):
    """The arguments of tunix's default loss."""
    mask = example.input_mask
    return {
        "input_tokens": example.input_tokens,
        "input_mask": mask,
        "positions": utils.build_positions_from_mask(mask),
        "attention_mask": utils.make_causal_attn_mask(mask),
    }


def loop(model, optimizer, data, steps):
    """The loop: tunix's own."""
    config = peft_trainer.TrainingConfig(eval_every_n_steps=1000, max_steps=steps)
    trainer = peft_trainer.PeftTrainer(model, optimizer, config).with_gen_model_input_fn(inputs)
    losses = Losses()
    trainer.with_training_hooks(losses)
    trainer.train(data)
    return losses.values


def train(recipe, given):
    """See `client.main`."""
    config = llama.ModelConfig(
        num_layers=2, vocab_size=client.VOCABULARY, embed_dim=client.WIDTH, hidden_dim=4 * client.WIDTH,
        num_heads=2, num_kv_heads=2, head_dim=32, rope_theta=10_000, norm_eps=1e-5,
    )  # fmt: skip
    model = llama.Llama3(config, rngs=nnx.Rngs(0))
    ones = jnp.ones((client.BATCH, client.LENGTH + 1), bool)
    data = [peft_trainer.TrainingInput(tokens, ones) for tokens in client.batches(given.steps)]
    example = inputs(data[0])
    args = (example["input_tokens"], example["positions"], None, example["attention_mask"])
    if given.lora:
        provider = qwix.LoraProvider(module_path=".*(q_proj|v_proj|up_proj|down_proj)", rank=8, alpha=16.0)
        model = qwix.apply_lora_to_model(model, provider, *args)
    model = fp8jax.transform(model, recipe)
    optimizer = optax.adamw(3e-3)
    if given.optimizer:
        optimizer = fp8jax.optim.adamw(3e-3, given.optimizer)
    losses = loop(model, optimizer, data, given.steps)
    report = fp8jax.report(model, *args)
    if recipe != "bf16":
        print(report)
    return client.Trained(losses[-1], report.fp8_share)


if __name__ == "__main__":
    client.main("google-tunix", train, given)
