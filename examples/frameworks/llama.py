"""A small Llama on torch, for the programs of Hugging Face's loops."""

import math
from typing import Any

import client
import torch
import transformers


def llama(steps: int) -> tuple[transformers.LlamaForCausalLM, torch.Tensor]:
    """The model, and the sequences of `client.batches`, shape (steps * BATCH, LENGTH + 1)."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        vocab_size=client.VOCABULARY, hidden_size=client.WIDTH, intermediate_size=4 * client.WIDTH,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    tokens = torch.tensor([row.tolist() for batch in client.batches(steps) for row in batch])
    return transformers.LlamaForCausalLM(config), tokens


def fp8_share(report: Any) -> float:
    """The share of the FLOPs of linear layers in FP8, by the report of torch, which has no FLOPs: all linear
    layers read the same tokens, so FLOPs follow their weights."""
    sizes = [(math.prod(row.shape), row.fp8) for row in report.rows if row.kind == "Linear"]
    return sum(size * share for size, share in sizes) / sum(size for size, _ in sizes)
