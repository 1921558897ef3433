"""Hugging Face Accelerate: an `Accelerator` with accumulation and clipping trains a small Llama on torch."""

import client

given = client.options(__doc__)

import accelerate  # noqa: E402
import fp8jax_torch  # noqa: E402
import llama  # noqa: E402
import torch  # noqa: E402


def loop(model, optimizer, data):
    """The loop: as Accelerate's pages have it."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for tokens in data:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(recipe, given):
    """See `client.main`."""
    model, tokens = llama.llama(given.steps)
    data = torch.utils.data.DataLoader(tokens, client.BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fp8jax_torch.prepare(model, optimizer, recipe)
    losses = loop(model, optimizer, data)
    report = fp8jax_torch.report(model)
    if recipe != "bf16":
        print(report)
    return client.Trained(losses[-1], llama.fp8_share(report))


if __name__ == "__main__":
    client.main("accelerate", train, given)
