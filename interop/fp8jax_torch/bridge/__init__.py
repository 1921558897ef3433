"""Weights, scaling state and optimizer state between torch and Flax, bit for bit: a run goes on in the other.

    variables = to_flax(model.state_dict(), GPT2, like=variables)
    opt_state = optimizer_to_flax(optimizer, model, GPT2, like=opt_state)
    ...                                                     # train in JAX
    model.load_state_dict(from_flax(variables, GPT2, like=model.state_dict()))
    optimizer.load_state_dict(optimizer_from_flax(opt_state, model, GPT2, like=optimizer))

`save` writes a torch model as a Hugging Face folder.

`like` is the model, or the optimizer's state, in which the run goes on, of the same size and recipe. One
error lists all differences. A `NameMap` says which tensor is where: `GPT2` and `LLAMA` for Hugging Face's
names, `mapping_of(model)` for modules with the same names on both sides, or any other map:

    NameMap((Rename(r"(.*)\\.weight", r"\\1/kernel", axes=(1, 0)), Rename(r"(.*)\\.bias", r"\\1/bias")))
    GPT2.stacked("h").moved("^transformer/", "")  # layers under `nn.scan`, and no module around them
"""

from fp8jax.checkpoints import GPT2 as GPT2
from fp8jax.checkpoints import LLAMA as LLAMA
from fp8jax.checkpoints import NameMap as NameMap
from fp8jax.checkpoints import Place as Place
from fp8jax.checkpoints import Rename as Rename
from fp8jax_torch.bridge.export import save as save
from fp8jax_torch.bridge.maps import mapping_of as mapping_of
from fp8jax_torch.bridge.optimizer import optimizer_from_flax as optimizer_from_flax
from fp8jax_torch.bridge.optimizer import optimizer_to_flax as optimizer_to_flax
from fp8jax_torch.bridge.weights import from_flax as from_flax
from fp8jax_torch.bridge.weights import to_flax as to_flax
