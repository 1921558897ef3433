"""MaxText: its `train_loop` of a small Llama.

The loop makes its model by `model_creation_utils.from_config`, which here returns the transformed model.
"""

import client

given = client.options(__doc__, client.OPTIMIZER)

import contextlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import tempfile  # noqa: E402

import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402

os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")

from maxtext.input_pipeline import input_pipeline_interface  # noqa: E402
from maxtext.optimizers import optimizers  # noqa: E402
from maxtext.trainers.pre_train import train as pre_train  # noqa: E402
from maxtext.utils import model_creation_utils  # noqa: E402

import fp8jax  # noqa: E402


@contextlib.contextmanager
def in_fp8(recipe, optimizer):
    """MaxText with FP8 matmuls, and perhaps an optimizer with FP8 moments."""
    get_optimizer = optimizers.get_optimizer
    from_config = model_creation_utils.from_config
    model_creation_utils.from_config = lambda *args, **kw: fp8jax.transform(from_config(*args, **kw), recipe)
    if optimizer:
        optimizers.get_optimizer = lambda config, rate, *args, **kw: fp8jax.optim.adamw(rate, optimizer)
    yield
    model_creation_utils.from_config, optimizers.get_optimizer = from_config, get_optimizer


def loop(settings, metrics_file):
    """The loop: MaxText's own."""
    config, recorder = pre_train.initialize(["", *[f"{name}={value}" for name, value in settings.items()]])
    pre_train.train_loop(config, recorder)
    with open(metrics_file) as lines:
        return config, json.loads(lines.readlines()[-1])["learning/loss"]


def as_batch(tokens):
    """A batch as the loop takes it."""
    positions = np.broadcast_to(np.arange(client.LENGTH, dtype=np.int32), (client.BATCH, client.LENGTH))
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    for name in ("inputs", "targets"):
        batch |= {f"{name}_position": positions, f"{name}_segmentation": np.ones_like(positions)}
    return batch


def settings_of(steps, folder):
    """The options of MaxText's base.yml that are not its defaults."""
    return {
        "run_name": "fp8", "base_output_directory": folder, "metrics_file": f"{folder}/metrics",
        "hardware": "cpu", "skip_jax_distributed_system": True, "enable_checkpointing": False, "steps": steps,
        "base_emb_dim": client.WIDTH, "base_mlp_dim": 4 * client.WIDTH, "base_num_decoder_layers": 2,
        "base_num_query_heads": 2, "base_num_kv_heads": 2, "head_dim": client.WIDTH // 2,
        "vocab_size": client.VOCABULARY, "max_target_length": client.LENGTH,
        "per_device_batch_size": client.BATCH, "attention": "dot_product", "learning_rate": 3e-3,
    }  # fmt: skip


def train(recipe, given):
    """See `client.main`."""
    data = [as_batch(tokens) for tokens in client.batches(given.steps)]
    input_pipeline_interface.create_data_iterator = lambda config, mesh: (iter(data), None)
    with tempfile.TemporaryDirectory() as folder, in_fp8(recipe, given.optimizer):
        config, loss = loop(settings_of(given.steps, folder), f"{folder}/metrics")
        model = nnx.eval_shape(model_creation_utils.get_nnx_create_model_fn(config))
    report = fp8jax.report(
        model, data[0]["inputs"], data[0]["inputs_position"], data[0]["inputs_segmentation"]
    )
    if recipe != "bf16":
        print(report)
    return client.Trained(loss, report.fp8_share)


if __name__ == "__main__":
    client.main("maxtext", train, given)
