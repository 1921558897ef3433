"""big_vision: its `train.main` of a small ViT.

The loop makes its model by the function `Model` of a module, which here returns the transformed model. Its
source has no package: `./dev test-clients bigvision` fetches it.
"""

import client

given = client.options(__doc__)

import contextlib  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from absl import flags  # noqa: E402
from big_vision import input_pipeline, utils  # noqa: E402
from big_vision import train as big_vision_train  # noqa: E402
from big_vision.models import vit  # noqa: E402
from ml_collections import ConfigDict  # noqa: E402

import fp8jax  # noqa: E402

COMMIT = "0127fb6b337e"  # the one that `./dev test-clients` fetches
CLASSES, PIXELS = 8, 32


@contextlib.contextmanager
def in_fp8(recipe):
    """big_vision's ViT with FP8 matmuls."""
    plain = vit.Model
    vit.Model = lambda *args, **kw: fp8jax.transform(plain(*args, **kw), recipe)
    yield
    vit.Model = plain


def loop(config, folder):
    """The loop: big_vision's own."""
    flags.FLAGS.config, flags.FLAGS.workdir = config, folder
    big_vision_train.main([])
    with open(f"{folder}/big_vision_metrics.txt") as lines:
        return json.loads(lines.readlines()[-1])["training_loss"]


def images(steps, seed=0):
    """A dataset of noisy images of `CLASSES` patterns, a batch for each step."""
    rng = np.random.default_rng(seed)
    patterns = rng.standard_normal((CLASSES, PIXELS, PIXELS, 3))
    labels = rng.integers(0, CLASSES, steps * client.BATCH)
    noise = rng.standard_normal((len(labels), PIXELS, PIXELS, 3))
    found = {"image": patterns[labels] + 4 * noise, "labels": np.eye(CLASSES)[labels]}
    return {name: x.astype(np.float32) for name, x in found.items()}


def config_of(steps):
    """The config, as a file of big_vision's `configs`."""
    # JAX wants one mesh around the GEMMs of `block`, and big_vision's batches are on an axis of this name.
    mesh = {"mesh": [("devices", jax.device_count())], "sharding_rules": [("act_batch", "devices")]}
    model = {"width": client.WIDTH, "depth": 2, "mlp_dim": 4 * client.WIDTH, "num_heads": 2}
    return ConfigDict(
        {
            **mesh,
            "input": {"batch_size": client.BATCH}, "total_steps": steps, "num_classes": CLASSES,
            "loss": "softmax_xent", "pp_modules": [], "log_training_steps": 1, "evals": {},
            "model_name": "vit", "model": {**model, "patch_size": (8, 8)},
            "optax_name": "scale_by_adam", "lr": 3e-3, "wd": 1e-4, "schedule": {"decay_type": "cosine"},
        }
    )  # fmt: skip


def train(recipe, given):
    """See `client.main`."""
    data = images(given.steps)
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(client.BATCH, drop_remainder=True)
    input_pipeline.training = lambda _: (dataset, len(data["labels"]))
    utils.chrono = utils.Chrono()  # the timer of one run
    utils.sync = lambda: None  # it waits for other processes, by a function that JAX 0.10.2 lacks
    config = config_of(given.steps)
    with tempfile.TemporaryDirectory() as folder, in_fp8(recipe):
        loss = loop(config, folder)
        model = vit.Model(num_classes=CLASSES, **config.model)
    with jax.transfer_guard("allow"):
        report = model.report(jnp.zeros((client.BATCH, PIXELS, PIXELS, 3)))
    if recipe != "bf16":
        print(report)
    return client.Trained(loss, report.fp8_share)


if __name__ == "__main__":
    flags.FLAGS(sys.argv[:1])
    client.main("big_vision", train, given, version=COMMIT)
