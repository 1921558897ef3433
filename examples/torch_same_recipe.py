"""Train transformers' GPT-2 on torch under a recipe, next to the same model in JAX.

    python examples/torch_same_recipe.py                        # minutes, on the standard library's source
    python examples/torch_same_recipe.py --data shakespeare.txt --steps 500 --cross 250
    python examples/torch_same_recipe.py --recipe te --plain bf16
    python examples/torch_same_recipe.py --recipe O3 --layers 4 --width 128 --out runs/torch-1

The model is made from its configuration, without a download. The bridge copies its weights to gpt_model.py's
GPT; then each side trains with the same recipe, settings and batches:

    torch       fp8jax_torch.prepare, and the loop that a torch user writes
    JAX         fp8jax.transform, and the loop that a JAX user writes
    reversed    torch, each batch's rows in the opposite order: the same sums but for their rounding
    plain       torch, in the high-precision format --plain

After --cross steps, weights, scales, moments and counters are copied from each side to the other, which goes
on with them: "torch>JAX" was trained by torch, then by JAX. The runs above go on, too. Prints two tables and
leaves them, with a picture and all losses, in the folder --out. --help lists options.
"""

import dataclasses
import json
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import corpus
import fp8jax_torch
import fp8jax_torch.optim
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import transformers
from fp8jax_torch.bridge import GPT2, from_flax, optimizer_from_flax, optimizer_to_flax, to_flax
from fp8jax_torch.scaled import is_scaled
from gpt_config import GPTOptions
from gpt_model import GPT, GPTConfig
from same_runs import Run, draw, loss_rows, output, run_rows

import fp8jax
from fp8jax import train
from fp8jax.recipe import Recipe
from fp8jax.train.config import option
from fp8jax.train.metrics import Bytes
from fp8jax.train.step.optimizers import decays

# gpt_model.py scans its blocks, so their weights are stacked, and has no "transformer" around its parts.
MAPPING = GPT2.stacked("h").moved("^transformer/", "")
VALIDATION_BATCHES = 40
ROWS = 10  # of the table of losses


@dataclasses.dataclass(frozen=True)
class Config(GPTOptions):
    """Settings of a comparison; the defaults take minutes on a CPU."""

    recipe: str = option("O2", "precision recipe of both sides, with changes: O2,scaling=current")
    plain: str = option("fp32", "recipe of the plain run", choices=("fp32", "bf16"))
    backend: str = option("auto", "who multiplies on torch: native, te, msamp, torchao or auto")
    steps: int = option(300, "optimizer steps", least=1)
    cross: int = option(0, "steps after which the sides change over; 0 is never", least=0)
    out: str = option("runs/torch_same", "folder of the results; what is there is replaced")

    def __post_init__(self) -> None:
        train.config.validate(self)
        Recipe.parse(self.recipe)
        if self.cross >= self.steps:
            raise ValueError(f"--cross {self.cross} leaves no steps of --steps {self.steps}; make it less")


class OnTorch:
    """transformers' GPT-2 and torch's AdamW, prepared for a recipe."""

    def __init__(self, config: Config, vocabulary: int, recipe: str):
        model = hugging_face(config, vocabulary)
        is_matrix = [parameter.ndim >= 2 for parameter in model.parameters()]
        groups = [
            {"params": [p for p, m in zip(model.parameters(), is_matrix, strict=True) if m == decayed]}
            | {"weight_decay": config.weight_decay if decayed else 0.0}
            for decayed in (True, False)
        ]
        adamw = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2))
        prepared = fp8jax_torch.prepare(model, adamw, recipe, config.backend, inplace=True)
        self.model: Any = prepared[0]
        self.optimizer = prepared[1]

    def loss(self, batch: np.ndarray) -> torch.Tensor:
        """The loss of the next character; batch shape=(rows, context + 1)."""
        tokens = torch.from_numpy(batch.copy()).long().to(self.model.device)
        logits = self.model(tokens[:, :-1]).logits.float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def step(self, batch: np.ndarray) -> float:
        """A step of training; the loss before it."""
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @property
    def skipped(self) -> int:
        """Steps not taken; torch's own AdamW takes all."""
        return getattr(self.optimizer, "skipped", 0)

    @torch.no_grad()
    def evaluate(self, batch: np.ndarray) -> float:
        """The loss, without training."""
        return self.loss(batch).item()

    def take(self, state: "State") -> "OnTorch":
        """Goes on with what JAX trained."""
        like = self.model.state_dict()
        self.model.load_state_dict(from_flax(state.variables, MAPPING, like=like))
        self.optimizer.load_state_dict(
            optimizer_from_flax(state.opt_state, self.model, MAPPING, like=self.optimizer)
        )
        return self

    def bytes(self) -> Bytes:
        """Bytes per parameter that are stored between steps."""
        parameters = list(self.model.parameters())
        count = sum(parameter.numel() for parameter in parameters)

        def size(tensors: Any) -> float:
            parts = [[x.codes, x.scale] if is_scaled(x) else [x] for x in tensors if x is not None]
            return sum(part.nbytes for each in parts for part in each) / count

        kept = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        scaling = [buffer for name, buffer in self.model.named_buffers() if ".fp8." in name]
        return Bytes(size(parameters), size(p.grad for p in parameters), size(kept), size(scaling))


def hugging_face(config: Config, vocabulary: int) -> Any:
    """GPT-2 as transformers has it, tied head and all, with random weights and without dropout."""
    sizes = {"n_layer": config.layers, "n_head": config.heads, "n_embd": config.width}
    tokens = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 0}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    settings: dict[str, Any] = {"n_positions": config.context, **sizes, **tokens, **dropouts}
    torch.manual_seed(config.seed)
    model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings))
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


class State(NamedTuple):
    """The arrays that a step in JAX changes."""

    variables: Any
    opt_state: Any


class Program:
    """gpt_model.py's GPT under a recipe, compiled; it keeps no state."""

    def __init__(self, config: Config, vocabulary: int):
        recipe = Recipe.parse(config.recipe)
        sizes = {name: getattr(config, name) for name in ("layers", "heads", "width", "context")}
        gpt = GPT(GPTConfig(vocabulary, **sizes, bias=True, tied=True))
        model = fp8jax.transform(gpt, recipe)
        betas = (config.beta1, config.beta2)
        tx = fp8jax.optim.adamw(config.lr, recipe, *betas, weight_decay=config.weight_decay, mask=decays)

        def loss(variables: Any, batch: jax.Array) -> jax.Array:
            logits = model.apply(variables, batch[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

        def step(state: State, batch: jax.Array) -> tuple[State, jax.Array]:
            value, grads, variables = fp8jax.value_and_grad(loss)(state.variables, batch)
            updates, opt_state = tx.update(grads, state.opt_state, variables["params"])
            return State(fp8jax.apply_updates(variables, updates), opt_state), value

        tokens = jax.ShapeDtypeStruct((config.batch, config.context + 1), np.int32)
        self.step, self.loss, self.init_optimizer = jax.jit(step), jax.jit(loss), tx.init
        # Names, shapes and formats: what is in them comes from torch.
        like = jax.eval_shape(
            model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, config.context), np.int32)
        )
        self.variables = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        self.gradients = jax.eval_shape(fp8jax.value_and_grad(loss), self.variables, tokens)[1]

    def start(self, side: OnTorch) -> State:
        """The state of a torch model before the first step."""
        if not isinstance(side.optimizer, fp8jax_torch.optim.AdamW):  # torch's own has no state yet
            variables = to_flax(side.model.state_dict(), MAPPING, like=self.variables)
            return State(variables, self.init_optimizer(variables))
        for parameter in side.model.parameters():
            side.optimizer.ensure_state(parameter)
        return self.take(side)

    def take(self, side: OnTorch) -> State:
        """Takes the weights and the state that torch trained."""
        variables = to_flax(side.model.state_dict(), MAPPING, like=self.variables)
        like = self.init_optimizer(variables)
        opt_state = optimizer_to_flax(side.optimizer, side.model, MAPPING, like=like)
        return State(variables, opt_state)


class InJax:
    """A run of a `Program`."""

    def __init__(self, program: Program, state: State):
        self.program, self.state = program, state

    def step(self, batch: np.ndarray) -> float:
        """A step of training; the loss before it."""
        self.state, loss = self.program.step(self.state, batch)
        return float(loss)

    @property
    def skipped(self) -> int:
        """Steps not taken."""
        return int(fp8jax.optim.skipped(self.state.opt_state))

    def evaluate(self, batch: np.ndarray) -> float:
        """The loss, without training."""
        return float(self.program.loss(self.state.variables, batch))

    def bytes(self) -> Bytes:
        """Bytes per parameter that are stored between steps."""
        return train.metrics.bytes_per_parameter(
            self.state.variables, self.program.gradients, self.state.opt_state
        )


def compare(config: Config) -> tuple[dict[str, Run], str]:
    """All runs, and which layers run in FP8."""
    text = corpus.load(config.data)
    corpus.check_length(text, config.batch, config.context)
    vocabulary, size = len(text.vocabulary), (config.batch, config.context)
    on_torch, program = OnTorch(config, vocabulary, config.recipe), Program(config, vocabulary)
    report = fp8jax_torch.report(on_torch.model)
    if config.cross and not report.why.startswith("native"):
        raise ValueError(f"--cross: a run of another library cannot change over ({report.why})")
    runs = {
        "torch": Run(on_torch),
        "JAX": Run(InJax(program, program.start(on_torch))),
        "reversed": Run(OnTorch(config, vocabulary, config.recipe), lambda batch: batch[::-1]),
        "plain": Run(OnTorch(config, vocabulary, config.plain)),
    }
    drawn = corpus.RandomWindows(text.train, config.context, config.batch, config.steps, config.seed)
    for first, last in ((1, config.cross), (config.cross + 1, config.steps)):
        batches = {step: drawn.step(step) for step in range(first, last + 1)}
        for name, run in runs.items():
            run.advance(batches)
            print(f"{name}: {last} steps", file=sys.stderr, flush=True)
        if last == config.cross > 0:
            runs["torch>JAX"] = Run(InJax(program, program.take(on_torch)))
            trained = runs["JAX"].side.state
            runs["JAX>torch"] = Run(OnTorch(config, vocabulary, config.recipe).take(trained))
    for run in runs.values():
        windows = corpus.windows(text.validation, *size, VALIDATION_BATCHES)
        batches = windows.reshape(-1, config.batch, config.context + 1)
        run.validation = statistics.mean(map(run.side.evaluate, batches))
    return runs, str(report)


def keep(runs: dict[str, Run], config: Config) -> str:
    """Writes tables, curves and losses; returns the tables."""
    folder = pathlib.Path(config.out)
    folder.mkdir(parents=True, exist_ok=True)
    ends = {1, config.cross, *np.linspace(0, config.steps, ROWS + 1, dtype=int).tolist()} - {0}
    tables = "\n\n".join(map(output.table, (loss_rows(runs, ends), run_rows(runs))))
    about = output.environment(jax.devices()[0].device_kind, ("jax", "torch", "transformers"))
    result = {
        "environment": {**about, "threads": torch.get_num_threads()},
        "settings": train.config.saved_options(config),
        "runs": {
            name: {
                "validation_loss": run.validation,
                "bytes_per_parameter": run.side.bytes()._asdict(),
                "ms_per_step": run.milliseconds,
                "skipped": run.side.skipped,
                "first_step": min(run.losses),
                "losses": [round(loss, 7) for loss in run.losses.values()],
            }
            for name, run in runs.items()
        },
    }
    (folder / "result.json").write_text(json.dumps(result) + "\n")
    (folder / "table.txt").write_text(f"{about['command']}\n\n{tables}\n")
    draw(runs, f"GPT-2 at {config.recipe}, on torch and in JAX", config.cross, folder / "losses.png")
    return tables


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit status."""
    try:
        with train.blame_input():
            config = Config(**train.config.read(Config, argv, __doc__ or ""))
            runs, report = compare(config)
    except train.BadInput as error:
        print(f"torch_same_recipe: {error}", file=sys.stderr)
        return 2
    print(f"{report}\n\n{keep(runs, config)}\n\n{pathlib.Path(config.out) / 'losses.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
