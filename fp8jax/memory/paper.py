"""FP8-LM's table of memory and traffic, and the plan for the same settings next to it.

The paper trains with Megatron-LM: bfloat16 weights and float32 gradients on each GPU, moments and masters
split (ZeRO stage 1), flash attention, no other rematerialization. Planned are our recipes: float32 weights
in `bf16` and `te`, all but products computed again in the backward, one layer's attention scores in memory.
Tensor and pipeline parallelism, which fp8jax leaves to its user's mesh, are arithmetic here.

References:
    FP8-LM, arXiv 2310.18313, section 3.2 (tokens, GPUs, parallel degrees, memory, and the weights' traffic).
"""

from typing import Any, NamedTuple

from fp8jax.memory.planner import Plan, plan
from fp8jax.memory.subject import subject
from fp8jax.models.probe import GPTS


class Setting(NamedTuple):
    """One row of the paper's table."""

    model: str
    tensor: int
    pipeline: int
    data: int
    recipe: str  # of ours
    batch: int  # sequences in a micro-batch
    memory: float  # GB on one GPU
    traffic: float  # GB of weights and their gradients, of one GPU in a step


SETTINGS = [
    Setting(model, *degrees, *row)
    for model, degrees, rows in (
        (
            "gpt-7b",
            (1, 1, 32),
            (("bf16", 2, 69.6, 37.2), ("te", 2, 77.3, 37.2), ("O2", 2, 49.4, 13.9), ("O2", 4, 69.3, 13.9)),
        ),
        (
            "gpt-13b",
            (2, 1, 16),
            (("bf16", 2, 68.2, 34.3), ("te", 2, 76.4, 34.3), ("O2", 2, 48.9, 12.4), ("O2", 4, 67.8, 12.4)),
        ),
        (
            "gpt-175b",
            (8, 4, 4),
            (("bf16", 1, 66.1, 23.4), ("te", 1, 69.6, 23.4), ("O2", 1, 40.3, 8.2), ("O2", 4, 57.7, 8.2)),
        ),
    )
    for row in rows
]


def rows(settings: list[Setting] = SETTINGS) -> list[dict[str, Any]]:
    """What is planned for the settings on H100s, next to the paper's figures."""
    found = []
    for setting in settings:
        planned = on_one(setting)
        found.append(
            {
                "model": setting.model,
                "recipe": setting.recipe,
                "batch": setting.batch,
                "paper GB": setting.memory,
                "GB": planned.total / 1e9,
                "kept": planned.kept / 1e9,
                "gradients": planned.gradients / 1e9,
                "activations": planned.activations / 1e9,
                "temporaries": planned.temporaries / 1e9,
                "paper traffic": setting.traffic,
                "traffic": planned.sent / 1e9,
            }
        )
    return found


def on_one(setting: Setting) -> Plan:
    """The plan for one GPU: of a pipeline's first stage, and of its tensors an equal part.

    That stage holds the activations of as many micro-batches as there are stages.
    """
    layers = GPTS[setting.model]["layers"] // setting.pipeline
    of = subject(setting.model, layers=layers, batch=setting.batch)
    planned = plan(
        of.model, setting.recipe, *of.inputs, loss=of.loss, devices=setting.data, stage=1, target="h100"
    )
    planned = planned._replace(activations=planned.activations * setting.pipeline)
    parts = ("weights", "moments", "master", "gradients", "activations", "temporaries", "sent")
    return planned._replace(**{name: getattr(planned, name) // setting.tensor for name in parts})
