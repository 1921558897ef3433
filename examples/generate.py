"""Continue a text with a run of train_gpt.py, and with the Hugging Face folder that is exported from it.

    python examples/generate.py runs/gpt-1 --prompt "def " --tokens 40
    python examples/generate.py runs/gpt-1 --format fp8:ue8m0 --export served

Prints the text that the trained model continues greedily, and whether the exported weights, loaded into the
model, say the same tokens. They do if the format has the codes that the model multiplies with.
"""

import argparse
import dataclasses
import functools
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import train_gpt
from gpt_model import GPT, GPTConfig

import fp8jax
from fp8jax.checkpoints import FORMATS, GPT2, NameMap, load, save
from fp8jax.train import run_folder

# gpt_model.py has no "transformer" around its parts; its blocks are stacked, or h_0, h_1, ...
_BACK = ("^(?!lm_head/)", "transformer/")
NAMES = GPT2.stacked("h").moved("^transformer/", "", back=_BACK)
NAMES_OF_BLOCKS = GPT2.moved(r"h/(\d+)/", r"h_\1/", back=(r"h_(\d+)/", r"h/\1/"))
NAMES_OF_BLOCKS = NAMES_OF_BLOCKS.moved("^transformer/", "", back=_BACK)


def cached(module: GPT) -> GPT:
    """The module with a cache of keys and values; its parameters are the same."""
    return GPT(dataclasses.replace(module.config, attention="cached", remat=False))


def names_of(module: GPT) -> NameMap:
    """The map from Hugging Face's names."""
    return NAMES if module.config.scan else NAMES_OF_BLOCKS


def hugging_face_config(module: GPT) -> dict[str, Any]:
    """The model's config.json."""
    sizes: GPTConfig = module.config
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": sizes.vocabulary,
        "n_embd": sizes.width,
        "n_layer": sizes.layers,
        "n_head": sizes.heads,
        "n_positions": sizes.context,
        "tie_word_embeddings": sizes.tied,
    }


@functools.partial(jax.jit, static_argnames=("model", "count"))
def generate(model: Any, variables: Any, prompt: jax.Array, count: int) -> jax.Array:
    """The next tokens, each the most probable one: (batch, time) -> (batch, count).

    Args:
        model: a `cached` GPT, or one from `fp8jax.transform`.
        variables: of the model.
        prompt: tokens; with the new ones they are at most the model's context.
        count: number of new tokens.

    Raises:
        ValueError: these are more tokens than the context.
    """
    context = getattr(model, "module", model).config.context
    if prompt.shape[1] + count > context:
        raise ValueError(f"expected at most {context} tokens, the context; got {prompt.shape[1]} + {count}")

    def next_token(cache: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        logits, changed = model.apply({**variables, **cache}, tokens, mutable=["cache"])
        return {"cache": changed["cache"]}, logits[:, -1].argmax(-1).astype(prompt.dtype)

    def step(carry: Any, _: Any) -> tuple[Any, jax.Array]:
        cache, token = carry
        return next_token(cache, token[:, None]), token

    _, tokens = jax.lax.scan(step, next_token({}, prompt), length=count)
    return tokens.T


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit status: 1 if the export says other tokens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=pathlib.Path, help="the folder of a run")
    parser.add_argument("--prompt", default="def ", help="(default 'def ')")
    parser.add_argument("--tokens", type=int, default=40, help="at least 1 (default 40)")
    parser.add_argument("--format", default="fp8", choices=FORMATS, help="of the export (default fp8)")
    parser.add_argument(
        "--export", type=pathlib.Path, help="the new folder of the export (default: none stays)"
    )
    args = parser.parse_args(argv)
    if args.tokens < 1:
        parser.error(f"--tokens: expected at least 1; got {args.tokens}")

    try:
        return compare(args.run, args.prompt, args.tokens, args.format, args.export)
    except ValueError as error:
        parser.error(" ".join(str(error).split()))


def compare(folder: pathlib.Path, start: str, count: int, format: str, to: pathlib.Path | None) -> int:
    """Prints the text of a run, and whether its export in a format says the same; returns 1 if not."""
    run = train_gpt.prepare(["--out", str(folder), "--resume"])
    trainer, text = run.trainers[0], run.text.vocabulary
    found = run_folder.restore(folder, [one.like for one in run.trainers], "", or_start=False)
    if found is None or not start or not set(start) <= set(text):
        raise ValueError(f"expected a checkpoint in {folder}, and a prompt of its text's characters")
    module, variables = trainer.model.module, found.state[0].variables
    prompt = np.array([[text.index(character) for character in start]])
    model = fp8jax.transform(cached(module), trainer.model.recipe, rules=trainer.model.settings.rules)
    tokens = generate(model, variables, prompt, count)
    print(start + "".join(text[token] for token in tokens[0]))

    with tempfile.TemporaryDirectory() as temporary:
        exported = to or temporary
        options = {"mapping": names_of(module), "config": hugging_face_config(module)}
        save(exported, trainer.model, variables, prompt, format=format, **options)
        like = {**variables, "params": jax.eval_shape(lambda: variables["params"])}
        served = load(exported, like=like, mapping=names_of(module))
    is_same = bool(jnp.array_equal(generate(model, served, prompt, count), tokens))
    print(f"{format}: the export says {'the same' if is_same else 'other'} tokens")
    return int(not is_same)


if __name__ == "__main__":
    sys.exit(main())
