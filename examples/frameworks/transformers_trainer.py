"""Hugging Face transformers: `Trainer` of a small Llama on torch."""

import client

given = client.options(__doc__)

import tempfile  # noqa: E402

import fp8jax_torch  # noqa: E402
import llama  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402


class Losses(transformers.TrainerCallback):
    """Collects the losses."""

    def __init__(self):
        self.values: list[float] = []

    def on_log(self, args, state, control, logs=None, **kwargs):  # noqa: D102
        if "loss" in logs:
            self.values.append(logs["loss"])


def loop(model, optimizer, data, steps):
    """The loop: transformers' own."""
    losses = Losses()
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=client.BATCH,
            logging_steps=1,
            save_strategy="steps",
            save_steps=steps // 2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            train_sampling_strategy="sequential",
        )
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        trainer = transformers.Trainer(
            model, args, train_dataset=data, optimizers=(optimizer, schedule), callbacks=[losses]
        )
        trainer.train()
    return losses.values


def train(recipe, given):
    """See `client.main`."""
    model, tokens = llama.llama(given.steps)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fp8jax_torch.prepare(model, optimizer, recipe)
    losses = loop(model, optimizer, data, given.steps)
    report = fp8jax_torch.report(model)
    if recipe != "bf16":
        print(report)
    return client.Trained(losses[-1], llama.fp8_share(report))


if __name__ == "__main__":
    client.main("transformers", train, given)
