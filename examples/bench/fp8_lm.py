"""FP8-LM's table of memory and traffic, next to programs compiled for the same settings.

    python examples/bench/fp8_lm.py

It compiles for H100s that are not here. Finished rows stay in the folder of `fp8jax plan`'s.

The paper trains with Megatron-LM: bfloat16 weights and float32 gradients on each GPU, moments and masters
sharded (ZeRO stage 1), flash attention, no other remat. Programs here have float32 weights in `bf16` and
`te`, rematerialize all but GEMM outputs, and hold one layer's attention scores in memory. They contain the
data parallelism; fp8jax leaves tensor and pipeline parallelism to its user's mesh, so here they divide the
bytes.

References:
    FP8-LM, arXiv 2310.18313, section 3.2 (tokens, GPUs, parallel degrees, memory, and the weights' traffic).
"""

import dataclasses
import pathlib
from typing import Any, NamedTuple

import jax

from fp8jax.inspect import memory, targets
from fp8jax.inspect.memory.cache import default_folder
from fp8jax.inspect.models import GPTS
from fp8jax.inspect.subject import subject
from fp8jax.inspect.tables import records

H100 = targets.get("h100")


class Setting(NamedTuple):
    """One row of the paper's table."""

    model: str
    tensor: int  # degrees of tensor, pipeline and data parallelism
    pipeline: int
    data: int
    recipe: str  # the nearest recipe of ours
    batch: int  # sequences in a micro-batch
    memory: float  # GB on one GPU
    traffic: float  # GB of weights and their gradients that one GPU sends in a step


SETTINGS = [
    Setting("gpt-7b", 1, 1, 32, "bf16", 2, 69.6, 37.2),
    Setting("gpt-7b", 1, 1, 32, "te", 2, 77.3, 37.2),
    Setting("gpt-7b", 1, 1, 32, "O2", 2, 49.4, 13.9),
    Setting("gpt-7b", 1, 1, 32, "O2", 4, 69.3, 13.9),
    Setting("gpt-13b", 2, 1, 16, "bf16", 2, 68.2, 34.3),
    Setting("gpt-13b", 2, 1, 16, "te", 2, 76.4, 34.3),
    Setting("gpt-13b", 2, 1, 16, "O2", 2, 48.9, 12.4),
    Setting("gpt-13b", 2, 1, 16, "O2", 4, 67.8, 12.4),
    Setting("gpt-175b", 8, 4, 4, "bf16", 1, 66.1, 23.4),
    Setting("gpt-175b", 8, 4, 4, "te", 1, 69.6, 23.4),
    Setting("gpt-175b", 8, 4, 4, "O2", 1, 40.3, 8.2),
    Setting("gpt-175b", 8, 4, 4, "O2", 4, 57.7, 8.2),
]


def row(setting: Setting, cache: pathlib.Path | None = None) -> dict[str, Any]:
    """The paper's figures of a setting, and those of its program, compiled for an H100.

    Args:
        setting: one of `SETTINGS`.
        cache: as in `memory.plan`.
    """
    planned = on_one(setting, cache)
    return {
        "model": setting.model,
        "recipe": setting.recipe,
        "batch": setting.batch,
        "paper GB": setting.memory,
        "GB": planned.total / 1e9,
        "stored": planned.stored / 1e9,
        "temporaries": planned.temporaries / 1e9,
        "paper traffic": setting.traffic,
        "traffic": planned.sent / 1e9,
    }


def on_one(setting: Setting, cache: pathlib.Path | None = None) -> memory.MemoryPlan:
    """The plan for one GPU: the first stage of a pipeline, divided by the degree of tensor parallelism.

    The first stage holds the activations of as many micro-batches as the pipeline has stages; here they are
    one batch.
    """
    layers = GPTS[setting.model]["layers"] // setting.pipeline
    of = subject(setting.model, layers=layers, batch=setting.batch * setting.pipeline)
    # The program has whole tensors, so it gets a larger GPU: XLA rematerializes where memory is short.
    target = dataclasses.replace(H100, memory=H100.memory * setting.tensor)
    options: dict[str, Any] = {"devices": setting.data, "stage": 1, "target": target, "cache": cache}
    planned = memory.plan(of.model, setting.recipe, *of.inputs, loss=of.loss, **options)
    parts = ("weights", "moments", "master", "temporaries", "sent")
    return planned._replace(**{name: getattr(planned, name) // setting.tensor for name in parts})


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    print(records([row(setting, default_folder()) for setting in SETTINGS]))
