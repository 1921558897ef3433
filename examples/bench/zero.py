"""Bytes on each device of a GPT's training step by ZeRO stage: compiled, and as `fp8jax plan` predicts them.

    python examples/bench/zero.py
    python examples/bench/zero.py --recipes bf16 te O2 --devices 8 --stages 0 3 --json

One step (gradient, AdamW) is compiled for each stage and number of devices, for this machine's processor and
for GPUs that are not here. "peak MB" is what the compiler says that one device needs: arguments, results that
take no argument's place, temporaries. The batch per device is always the same. "MB sent" is as in wire.py.
"""

import argparse
import contextlib
from typing import Any

import jax
import numpy as np
import output
import wire
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8jax
from fp8jax import memory, program, targets
from fp8jax.comm import Zero
from fp8jax.memory.subject import Subject, subject
from fp8jax.optim.state import is_adam_state
from fp8jax.scaled import is_scaled


def compiled(subject: Subject, recipe: str, mesh: Mesh, stage: int) -> Any:
    """The training step of a model on a mesh."""
    model, zero = fp8jax.transform(subject.model, recipe), Zero(mesh, recipe, stage)
    tx = fp8jax.optim.adamw(1e-3, recipe, zero=zero)

    def loss_fn(variables: Any, tokens: jax.Array) -> jax.Array:
        return subject.loss(model.apply(variables, tokens), tokens)

    def step(variables: Any, opt_state: Any, tokens: jax.Array) -> Any:
        loss, grads = fp8jax.value_and_grad(loss_fn, zero=zero)(variables, tokens)
        updates, opt_state = tx.update(grads, opt_state, variables)
        return fp8jax.apply_updates(variables, updates), opt_state, loss

    [tokens] = subject.inputs
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), np.zeros(tokens.shape, tokens.dtype)))
    opt_state = jax.eval_shape(tx.init, variables)
    batch = jax.ShapeDtypeStruct((tokens.shape[0] * mesh.size, *tokens.shape[1:]), tokens.dtype)
    params = variables["params"]

    def placed(tree: Any, like: Any, is_split: bool) -> Any:
        def place(leaf: Any, param: Any) -> Any:
            specs = zero.spec(leaf, split=is_split and zero.split_of(param) is not None)
            return jax.tree.map(lambda x, spec: _shape(x, mesh, spec), leaf, specs)

        return jax.tree.map(place, tree, like, is_leaf=is_scaled)

    def placed_state(node: Any) -> Any:
        if not is_adam_state(node):
            return _shape(node, mesh, P())
        mu, nu = (placed(tree, params, stage >= 1) for tree in (node.adam.mu, node.adam.nu))
        adam = node.adam._replace(count=_shape(node.adam.count, mesh, P()), mu=mu, nu=nu)
        master = jax.tree.map(
            lambda param, kept: None if kept is None else placed(kept, param, stage >= 1),
            params,
            node.master,
            is_leaf=is_scaled,
        )
        return node._replace(adam=adam, master=master, skipped=_shape(node.skipped, mesh, P()))

    others = {name: jax.tree.map(lambda x: _shape(x, mesh, P()), tree) for name, tree in variables.items()}
    variables = {**others, "params": placed(params, params, stage == 3)}
    opt_state = jax.tree.map(placed_state, opt_state, is_leaf=is_adam_state)
    step = jax.jit(step, donate_argnums=(0, 1))
    lowered = step.lower(variables, opt_state, _shape(batch, mesh, P(mesh.axis_names[0])))
    is_here = mesh.devices.flat[0].platform == "cpu"
    return lowered.compile(compiler_options=None if is_here else targets.COMPILER_OPTIONS)


def _shape(x: Any, mesh: Mesh, spec: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))


def rows(args: argparse.Namespace, target: str | None) -> list[dict[str, Any]]:
    """One row per recipe, number of devices and stage."""
    sizes = {name: getattr(args, name) for name in ("layers", "heads", "width", "context", "vocabulary")}
    model = subject("gpt", batch=args.batch, dtype=args.dtype, **sizes)
    found = []
    for recipe in args.recipes:
        for devices in args.devices:
            mesh = targets.mesh(target, devices) if target else _here(devices)
            for stage in args.stages:
                read = program.read(compiled(model, recipe, mesh, stage))
                options = {"loss": model.loss, "devices": devices, "stage": stage, "target": target}
                planned = memory.plan(model.model, recipe, *model.inputs, **options)
                found.append(
                    {
                        "recipe": recipe,
                        "devices": devices,
                        "ZeRO": stage,
                        "kept MB": read.arguments / 1e6,
                        "peak MB": read.total / 1e6,
                        "planned MB": planned.total / 1e6,
                        "planned / peak": planned.total / read.total,
                        "MB sent": sum(wire.sent(each, devices) for each in read.collectives) / 1e6,
                        "planned MB sent": planned.sent / 1e6,
                    }
                )
    return found


def _here(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("devices",), axis_types=(AxisType.Auto,))


def main() -> None:
    """Compiles, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="h200", choices=list(targets.TARGETS))
    parser.add_argument("--recipes", nargs="+", default=["O2"])
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2, help="sequences on each device")
    parser.add_argument("--dtype", default="bfloat16", help="of activations between products")
    output.add_options(parser)
    args = parser.parse_args()
    if args.tiny:
        args.layers, args.heads, args.width, args.context, args.vocabulary = 2, 2, 64, 32, 64
        args.devices, args.stages, args.batch = [2], [0, 3], 1
    with contextlib.suppress(RuntimeError):  # too late: the process has its devices
        jax.config.update("jax_num_cpu_devices", max(args.devices))
    if max(args.devices) > jax.device_count():
        parser.error(f"--devices {max(args.devices)}: this process has {jax.device_count()} devices")
    shape = f"{args.layers} layers of width {args.width}, {args.batch} x {args.context} tokens a device"
    sections = {f"{output.cpu_name()}, {shape}": rows(args, None)}
    if targets.why_not() is None:
        sections[f"{args.target}, {shape}"] = rows(args, args.target)
    output.finish("zero", f"{args.target}-{output.cpu_name()}", sections, args)


if __name__ == "__main__":
    main()
