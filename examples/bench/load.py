"""CPU seconds and memory of `fp8jax.checkpoints.load`, beside reading the same files.

    python examples/bench/load.py
    python examples/bench/load.py --layers 4 --width 1024 --ways "bf16 into bf16"

A folder has the seven kernels of each of Llama's layers, in bfloat16 and in FP8 with blocks of 128x128. Each
row is a process of its own, which loads the folder several times: "first s" are the CPU seconds of the first
load, "s" the least of the others, "cat s" those of reading the files once more, and "peak" is the growth of
resident memory, over the bytes of the folder; "arrays" is the loaded arrays' part of it.
"""

import json
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import output

import fp8jax
from fp8jax import LoRA
from fp8jax.checkpoints import load, save
from fp8jax.variables import FROZEN, PARAMS

# The folder's format, the recipe, the dtype of plain kernels, and adapters, which freeze kernels as codes.
ROWS = {
    "bf16 into bf16": ("bf16", "bf16", jnp.bfloat16, None),
    "bf16 into float32": ("bf16", "te", jnp.float32, None),
    "bf16 into O2's FP16 weights": ("bf16", "O2", jnp.float32, None),
    "bf16 into O3's E4M3 weights": ("bf16", "O3", jnp.float32, None),
    "FP8 into block's codes under LoRA": ("fp8", "block", jnp.bfloat16, LoRA(rank=8)),
    "FP8 into O3's E4M3 weights": ("fp8", "O3", jnp.float32, None),
}


def shapes(layers: int, width: int, dtype: Any) -> dict[str, Any]:
    """Kernels (in, out) of Llama's layers, with an MLP of 8/3 of the width in whole blocks of 128."""
    hidden = -(-8 * width // 3 // 128) * 128
    sides = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (width, width))
    sides |= {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    layer = {name: {"kernel": jax.ShapeDtypeStruct(shape, dtype)} for name, shape in sides.items()}
    return {str(number): layer for number in range(layers)}


def stack(params: Any, x: jax.Array) -> jax.Array:
    """Products of all kernels; no model, but each kernel is multiplied as in one."""
    for layer in params.values():
        kernel = {name: each["kernel"].astype(x.dtype) for name, each in layer.items()}
        x += (x @ kernel["q_proj"] + x @ kernel["k_proj"] + x @ kernel["v_proj"]) @ kernel["o_proj"]
        x += (jax.nn.silu(x @ kernel["gate_proj"]) * (x @ kernel["up_proj"])) @ kernel["down_proj"]
    return x


def like_of(name: str, layers: int, width: int) -> Any:
    """The variables of a row's model, with shapes in the place of the kernels."""
    _, recipe, dtype, lora = ROWS[name]
    model, x = fp8jax.transform(stack, recipe, lora=lora), jax.ShapeDtypeStruct((128, width), jnp.bfloat16)
    variables = jax.eval_shape(model.init, shapes(layers, width, dtype), x)
    own = FROZEN if FROZEN in variables else PARAMS
    zeros = lambda x: jnp.zeros(x.shape, x.dtype)  # noqa: E731
    return {part: tree if part == own else jax.tree.map(zeros, tree) for part, tree in variables.items()}


def write(folder: pathlib.Path, format: str, layers: int, width: int) -> None:
    """A folder of random kernels."""
    of_shapes = shapes(layers, width, jnp.bfloat16)
    leaves, treedef = jax.tree.flatten(of_shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    params = [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, leaves, strict=True)]
    model, x = fp8jax.transform(stack, "block"), jnp.zeros((128, width), jnp.bfloat16)
    variables = model.init(treedef.unflatten(params), x)
    save(folder, model, variables, x, mapping="llama", config={"model_type": "llama"}, format=format)


def cpu_seconds() -> float:
    """CPU seconds of this process so far, in user code and in the kernel."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def peak() -> int:
    """The largest resident memory of this process so far, in bytes; `getrusage` counts its parent's, too."""
    [line] = re.findall(r"VmHWM:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
    return 1024 * int(line)


def measure(name: str, folder: pathlib.Path, layers: int, width: int, loads: int) -> dict[str, Any]:
    """The row of a name."""
    like = like_of(name, layers, width)
    files = list(folder.glob("*.safetensors"))
    bytes_of_folder = sum(file.stat().st_size for file in files)
    before, seconds, grown, arrays = peak(), [], 0, 0
    for number in range(loads):
        begun = cpu_seconds()
        loaded = jax.block_until_ready(load(folder, like=like, mapping="llama"))
        seconds.append(cpu_seconds() - begun)
        if number == 0:
            grown, arrays = peak() - before, sum(x.nbytes for x in jax.tree.leaves(loaded))
        del loaded
    begun, buffer = cpu_seconds(), bytearray(1 << 20)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    return {
        "what": name,
        "GB": bytes_of_folder / 1e9,
        "first s": seconds[0],
        "s": min(seconds[1:], default=seconds[0]),
        "cat s": cpu_seconds() - begun,
        "peak": grown / bytes_of_folder,
        "arrays": arrays / bytes_of_folder,
    }


def main() -> None:
    """Measures and prints."""
    tiny = {"layers": 1, "width": 128, "loads": 1}
    defaults: dict[str, Any] = {"layers": 10, "width": 2048, "loads": 3, "ways": list(ROWS)}
    args = output.parse(__doc__, tiny=tiny, choices={"ways": ROWS}, row="", folder="", **defaults)
    if args.row:
        print(json.dumps(measure(args.row, pathlib.Path(args.folder), args.layers, args.width, args.loads)))
        return
    rows, sizes = [], [f"--{name}={getattr(args, name)}" for name in ("layers", "width", "loads")]
    with tempfile.TemporaryDirectory() as place:
        for format in dict.fromkeys(ROWS[name][0] for name in args.ways):
            write(pathlib.Path(place, format), format, args.layers, args.width)
        for name in args.ways:
            one = [f"--row={name}", f"--folder={place}/{ROWS[name][0]}"]
            command = [sys.executable, __file__, *sizes, *one]
            run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rows.append(json.loads(run.stdout))
    title = f"{output.device()}, {args.layers} layers of width {args.width}, {args.loads} loads"
    output.finish("load", output.device(), {title: rows}, args)


if __name__ == "__main__":
    main()
