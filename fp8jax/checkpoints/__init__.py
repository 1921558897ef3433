"""Models in the names and files of Hugging Face.

    save("served", model, variables, tokens, mapping=LLAMA, format="fp8", config=config)
    variables = load("served", like=variables, mapping=LLAMA)
    arrays = weights(model, variables, tokens, mapping=LLAMA, format="fp8")   # the same without files

A `NameMap` says which tensor of a torch model is where in Flax: `GPT2` and `LLAMA` for Hugging Face's names,
or any other map:

    NameMap((Rename(r"(.*)\\.weight", r"\\1/kernel", axes=(1, 0)), Rename(r"(.*)\\.bias", r"\\1/bias")))
    GPT2.stacked("h").moved("^transformer/", "")  # layers under `nn.scan`, and no module around them
"""

from fp8jax.checkpoints.divergence import divergence as divergence
from fp8jax.checkpoints.export import ExportReport as ExportReport
from fp8jax.checkpoints.export import save as save
from fp8jax.checkpoints.export import weights as weights
from fp8jax.checkpoints.loading import load as load
from fp8jax.checkpoints.maps import GPT2 as GPT2
from fp8jax.checkpoints.maps import LLAMA as LLAMA
from fp8jax.checkpoints.maps import MIXTRAL as MIXTRAL
from fp8jax.checkpoints.maps import QWEN3 as QWEN3
from fp8jax.checkpoints.names import NameMap as NameMap
from fp8jax.checkpoints.names import Place as Place
from fp8jax.checkpoints.names import Rename as Rename
from fp8jax.checkpoints.serving import FORMATS as FORMATS
