"""The command `fp8jax`.

fp8jax chart              the precision chart, read back from compiled programs
fp8jax doctor             what this machine multiplies in FP8, and whether a program does what its report says
fp8jax advise             what to type for a GPU: recipe, ZeRO stage, batch, layers to keep out of FP8
fp8jax estimate           time of a training step on a GPU that is not here, estimated
fp8jax export             a run of `fp8jax.train` as a Hugging Face folder
fp8jax plan               bytes on each device of a training step, compiled
fp8jax install-compiler   XLA's compiler for GPUs, which `--target` needs
"""

from fp8jax.cli.main import main as main
