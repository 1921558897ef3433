"""A plan is what the compiler says of the program, and what the live arrays take."""

import dataclasses
import functools
import json
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fp8jax
from fp8jax.comm import Zero
from fp8jax.inspect import memory, program, subject, targets
from fp8jax.inspect.memory import cache
from fp8jax.inspect.step import training_step
from fp8jax.optim.state import is_adam_state
from fp8jax.quantization import is_scaled

TINY = {"layers": 2, "heads": 2, "width": 32, "context": 16, "vocabulary": 65, "batch": 2}
SMALL = {"layers": 4, "heads": 4, "width": 256, "context": 256, "vocabulary": 1024, "batch": 8}


@functools.cache
def gpt(kind="dense", recipe="O2", **sizes):
    """A GPT, dense, with adapters or with experts."""
    of = subject.subject("gpt", **{**TINY, **sizes}, **({"experts": 4} if kind == "experts" else {}))
    if kind == "lora":
        of = of._replace(model=fp8jax.transform(of.model, recipe, lora=fp8jax.LoRA(rank=8)))
    return of


def planned(of, recipe, **options):
    return memory.plan(of.model, recipe, *of.inputs, loss=of.loss, **options)


def step_of(of, recipe, zero):
    """What makes the state, and a training step, as the README has them."""
    model = of.model if hasattr(of.model, "recipe") else fp8jax.transform(of.model, recipe)
    tx = fp8jax.optim.adamw(1e-3, recipe, zero=zero)

    def init(key):
        variables = model.init(key, *(jnp.zeros(x.shape, x.dtype) for x in of.inputs))
        variables = variables if zero is None else zero.place(variables)
        return variables, tx.init(variables)

    def step(variables, opt_state, *batch):
        loss_fn = lambda variables, *batch: of.loss(model.apply(variables, *batch), *batch)  # noqa: E731
        loss, grads, variables = fp8jax.value_and_grad(loss_fn, zero=zero)(variables, *batch)
        updates, opt_state = tx.update(grads, opt_state, variables)
        return fp8jax.apply_updates(variables, updates), opt_state, loss

    return init, step


def placed(zero, variables, opt_state, batch):
    """The shapes with the shardings that ZeRO's table gives them."""

    def put(leaf, spec):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(zero.mesh, spec))

    def put_all(tree, like, is_split):
        def one(param, leaf):
            split = is_split and zero.split_of(param) is not None
            return None if leaf is None else jax.tree.map(put, leaf, zero.spec(leaf, split=split))

        return jax.tree.map(one, like, tree, is_leaf=is_scaled)

    def put_state(node):
        if not is_adam_state(node):
            return put(node, PartitionSpec())
        trees = (put_all(tree, params, zero.stage >= 1) for tree in (node.adam.mu, node.adam.nu, node.master))
        mu, nu, master = trees
        count, skipped = (put(x, PartitionSpec()) for x in (node.adam.count, node.skipped))
        return node._replace(
            adam=node.adam._replace(mu=mu, nu=nu, count=count), master=master, skipped=skipped
        )

    params = variables["params"]
    variables = {
        **jax.tree.map(lambda x: put(x, PartitionSpec()), variables),
        "params": put_all(params, params, zero.stage == 3),
    }
    opt_state = jax.tree.map(put_state, opt_state, is_leaf=is_adam_state)
    return variables, opt_state, *(put(x, PartitionSpec(zero.axis)) for x in batch)


def compiled(of, recipe, target, devices, stage):
    """The program that is planned for, compiled without `memory.plan`."""
    if devices == 1:
        init, step = step_of(of, recipe, None)
        args = (*jax.eval_shape(init, jax.random.key(0)), *of.inputs)
    else:
        here = Mesh(np.array(jax.devices()[:devices]), ("devices",))
        zero = Zero(here if target is None else targets.mesh(target, devices), recipe, stage)
        init, step = step_of(of, recipe, zero)
        batch = [jax.ShapeDtypeStruct((x.shape[0] * devices, *x.shape[1:]), x.dtype) for x in of.inputs]
        args = placed(zero, *jax.eval_shape(init, jax.random.key(0)), batch)
    if target is not None:
        options = {"target": target, "devices": devices, "donate_argnums": (0, 1)}
        return targets.compile_for(step, *args, **options)
    return jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


# The compiled program ############################################################################


@pytest.mark.parametrize(
    "kind, recipe, target, devices, stage",
    [
        ("dense", "te", None, 2, 0),
        ("dense", "O2", None, 8, 1),
        ("dense", "O2", None, 4, 2),
        ("dense", "O3", None, 2, 3),
        ("lora", "O2", None, 1, 0),
        ("experts", "te", None, 1, 0),
        ("dense", "te", "h200", 8, 3),
        ("lora", "te", "h200", 1, 0),
        long("dense", "O2", "h200", 8, 2),
        long("dense", "O3", "h200", 8, 1),
        long("experts", "O3", "b200", 1, 0),
        long("experts", "O2", None, 4, 3),
    ],
)
def test_plan_is_the_compiled_program(kind, recipe, target, devices, stage):
    if target is not None and (reason := targets.why_not()):
        pytest.skip(reason)
    of = gpt(kind, recipe)
    plan = planned(of, recipe, target=target, devices=devices, stage=stage)
    found = compiled(of, recipe, target, devices, stage)
    bytes_of = found.memory_analysis()
    results = bytes_of.output_size_in_bytes - bytes_of.alias_size_in_bytes
    assert plan.stored == bytes_of.argument_size_in_bytes
    assert plan.total == plan.stored + results + bytes_of.temp_size_in_bytes
    assert (plan.recipe, plan.devices, plan.stage) == (recipe, devices, stage)
    assert plan.sent == program.read(found).sent(devices) and (plan.sent > 0) == (devices > 1)


@pytest.mark.long
def test_larger_plans_are_their_programs():
    for dtype, recipe, target in (
        ("float32", "te", None),
        ("bfloat16", "O2", None),
        ("bfloat16", "O3", "h200"),
    ):
        of = gpt(dtype=dtype, **SMALL)
        assert (
            planned(of, recipe, target=target).total == program.read(compiled(of, recipe, target, 1, 0)).total
        )


def test_each_parameter_is_reduced_once():
    """Without FP8 each device sends float32 gradients around a ring, there and back."""
    of = gpt()
    model = fp8jax.transform(of.model, "bf16")
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 16), jnp.int32)))
    numbers = sum(leaf.size for leaf in jax.tree.leaves(shapes["params"]))
    assert planned(of, "bf16", devices=4).sent == pytest.approx(2 * 3 / 4 * 4 * numbers, rel=0.01)


# Live arrays #####################################################################################


def between_steps(of, recipe, **options):
    """A plan of the bytes stored between steps alone, for which nothing is compiled."""
    loss_fn, args = subject.loss_of(fp8jax.transform(of.model, recipe), of.inputs, of.loss)
    variables, opt_state, *batch = training_step(loss_fn, *args, recipe=recipe, **options).args
    return memory.plan_of(variables, opt_state, batch, total=0)


@pytest.mark.parametrize("recipe, stage", [("O3", 1), long("O2", 3), long("te", 0), long("fp16_amp", 2)])
def test_stored_bytes_are_those_of_live_arrays(recipe, stage):
    zero, of = Zero(Mesh(np.array(jax.devices()), ("data",)), recipe, stage), gpt()
    init, _ = step_of(of, recipe, zero)
    variables, opt_state = jax.jit(init)(jax.random.key(0))

    def here(tree):
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))

    [adam] = (node for node in jax.tree.leaves(opt_state, is_leaf=is_adam_state) if is_adam_state(node))
    plan = between_steps(of, recipe, devices=zero.devices, stage=stage)
    assert plan.weights == here(variables)
    assert plan.moments == here((adam.adam.mu, adam.adam.nu))
    assert plan.master == here(adam.master)
    [tokens] = of.inputs
    assert plan.stored == here((variables, opt_state)) + tokens.size * tokens.dtype.itemsize


@pytest.mark.parametrize("name", ["adamw_8bit", long("adafactor")])
def test_other_optimizers_are_replicated(name):
    makers = {
        "adamw_8bit": fp8jax.optim.adamw_8bit,
        "adafactor": lambda rate, recipe: fp8jax.optim.with_dequantized(optax.adafactor(rate), recipe),
    }
    optimizer = lambda rate, recipe, zero: makers[name](rate, recipe)  # noqa: E731
    of = gpt()
    loss_fn, args = subject.loss_of(fp8jax.transform(of.model, "bf16"), of.inputs, of.loss)
    options = {"recipe": "bf16", "optimizer": optimizer}
    steps = [training_step(loss_fn, *args, **options, devices=n) for n in (1, 2)]
    one, two = (
        memory.plan_step(step.function, *step.args, target=None, devices=n)
        for step, n in zip(steps, (1, 2), strict=True)
    )
    assert two.moments == one.moments > 0 and two.stored == one.stored


# Models ##########################################################################################

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)


class Perceptron(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(64, 128, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(128, 64, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(nnx.gelu(self.up(x))))


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(64)(nn.gelu(nn.Dense(128)(x)))


def test_nnx_modules_of_arrays_and_shapes():
    of_arrays = memory.plan(Perceptron(nnx.Rngs(0)), "O2", X, devices=2, stage=2)
    of_shapes = memory.plan(nnx.eval_shape(lambda: Perceptron(nnx.Rngs(0))), "O2", X, devices=2, stage=2)
    linen = memory.plan(Dense(), "O2", X, devices=2, stage=2)
    assert of_arrays == of_shapes
    assert of_arrays[:7] == linen[:7] and of_arrays.sent == linen.sent


def test_a_function_is_planned_as_its_module():
    """The parameters are no part of the batch."""
    params = jax.eval_shape(Dense().init, jax.random.key(0), X)["params"]
    fn = lambda params, x: Dense().apply({"params": params}, x)  # noqa: E731
    where = {"devices": 2, "stage": 2}
    assert memory.plan(fn, "O2", params, X, **where) == memory.plan(Dense(), "O2", X, **where)


def test_a_loss_function_is_planned_as_its_model():
    model = fp8jax.transform(Dense(), "te")
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 64))))
    loss_fn = lambda variables, x: jnp.mean(jnp.square(model.apply(variables, x)))  # noqa: E731
    step = training_step(loss_fn, variables, X, recipe="te")
    assert memory.plan_step(step.function, *step.args, recipe="te", target=None) == memory.plan(
        Dense(), "te", X
    )


def test_plan_of_user_step():
    """A plan of a training step that the user wrote."""

    def step(variables, opt_state, x):
        return variables @ x, opt_state + 1, jnp.sum(x)

    args = (jnp.zeros((64, 64)), jnp.zeros((64, 64)), jnp.zeros((64, 64)))
    found = memory.plan_step(step, *args, recipe="mine", target=None)
    expected = program.read(jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile())
    assert (found.recipe, found.weights, found.moments, found.inputs) == ("mine", *[4 * 64 * 64] * 3)
    assert found.total == expected.total


@pytest.mark.parametrize(
    "call, error, says",
    [
        (lambda: memory.plan(object(), "te", X), TypeError, "`model`: expected a Flax module"),
        (lambda: memory.plan(Dense(), "te", X, target="h300"), ValueError, "`target`: expected one of h100"),
        (
            lambda: memory.plan(Dense(), "te", X, devices=0),
            ValueError,
            "`devices`: expected a positive number",
        ),
        (lambda: memory.plan(Dense(), "te", X, devices=9), ValueError, r'"jax_num_cpu_devices", 9\)'),
        (lambda: memory.plan(Dense(), "te", X, stage=4), ValueError, "`stage`: expected 0, 1, 2 or 3"),
        (
            lambda: training_step(jnp.sum, {}, jax.ShapeDtypeStruct((), jnp.float32), recipe="te", devices=2),
            ValueError,
            "`inputs`: expected arrays with rows",
        ),
    ],
)
def test_bad_input(call, error, says):
    with pytest.raises(error, match=says):
        call()


# The cache #######################################################################################


@pytest.fixture
def count(monkeypatch):
    """Programs that were compiled since."""
    compile_, found = jax.stages.Lowered.compile, []

    def counted(self, *args, **kwargs):
        found.append(self)
        return compile_(self, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", counted)
    return found


def test_a_finished_plan_is_not_compiled_again(tmp_path, count):
    options = {"devices": 2, "stage": 2, "cache": tmp_path / "new"}
    first = memory.plan(Dense(), "te", X, **options)
    assert len(count) == 1
    assert memory.plan(Dense(), "te", X, **options) == first and len(count) == 1
    assert memory.plan(Dense(), "te", X, **{**options, "cache": None}) == first and len(count) == 2
    for other in ({"stage": 0}, {"devices": 4}):
        memory.plan(Dense(), "te", X, **{**options, **other})
    assert len(count) == 4 and len(list((tmp_path / "new").iterdir())) == 3


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", '{"total": 1}', '{"total": -1, "sent": 0}', '{"total": "1", "sent": 0}', "\udcff"],
)
def test_a_damaged_plan_is_made_again(tmp_path, count, damage):
    plan = functools.partial(memory.plan, nn.Dense(8), "bf16", X, cache=tmp_path)
    first = plan()
    [path] = tmp_path.iterdir()
    path.write_bytes(damage.encode(errors="surrogateescape"))
    assert plan() == first and len(count) == 2
    assert json.loads(path.read_text()) == {"total": first.total, "sent": 0}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, count):
    (tmp_path / "file").touch()
    first, second = (memory.plan(nn.Dense(8), "bf16", X, cache=tmp_path / "file") for _ in range(2))
    assert first == second and len(count) == 2


def test_a_program_for_another_gpu_or_jaxlib_has_another_name(tmp_path, monkeypatch):
    lowered = jax.jit(jnp.sin).lower(1.0)
    name = functools.partial(cache.path_of, folder=tmp_path)
    names = {name(lowered, target) for target in (None, "h100", "h200", targets.get("h200"))}
    assert len(names) == 3 and name(jax.jit(jnp.cos).lower(1.0), None) not in names
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.0.1")
    assert name(lowered, None) not in names


def test_the_cache_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_folder() == tmp_path / "fp8jax/plan"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert cache.default_folder() == tmp_path / "home/.cache/fp8jax/plan"


# FP8-LM's table ##################################################################################


@pytest.mark.skipif(targets.why_not() is not None, reason=str(targets.why_not()))
def test_papers_settings_are_parts_of_plans(load_program, tmp_path):
    """A pipeline stage has its layers, and all micro-batches under way; tensors are divided."""
    fp8_lm = load_program("examples/bench/fp8_lm.py")
    one = fp8_lm.on_one(fp8_lm.Setting("gpt-125m", 2, 3, 4, "bf16", 1, 0.0, 0.0), tmp_path)
    of, h100 = subject.subject("gpt-125m", layers=4, batch=3), targets.get("h100")
    target = dataclasses.replace(h100, memory=2 * h100.memory)
    whole = planned(of, "bf16", target=target, devices=4, stage=1, cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1  # the same program
    assert (one.weights, one.moments) == (whole.weights // 2, whole.moments // 2)
    assert (one.temporaries, one.sent) == (whole.temporaries // 2, whole.sent // 2)


def test_papers_figures_are_the_pages(load_program):
    """The rows of docs/figures.md have the settings of the program, and the paper's memory and traffic."""
    settings = load_program("examples/bench/fp8_lm.py").SETTINGS
    page = (pathlib.Path(__file__).parent.parent / "docs/figures.md").read_text()
    table = page.split("## Memory next to FP8-LM's")[1].split("---:|\n")[1].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    assert [(*row[:2], *map(float, (row[2], row[3], row[7]))) for row in rows] == [
        (of.model, of.recipe, of.batch, of.memory, of.traffic) for of in settings
    ]
