"""What is kept is counted exactly; what a step needs in all is predicted within 10% of what XLA takes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fp8jax
from fp8jax import memory, program, targets
from fp8jax.comm import Zero
from fp8jax.memory import paper, subject
from fp8jax.optim.state import is_adam_state
from fp8jax.scaled import is_scaled

TINY = {"layers": 3, "heads": 2, "width": 64, "context": 32, "vocabulary": 65, "batch": 8}
NANO = {**TINY, "layers": 4, "heads": 4, "width": 128, "context": 64, "batch": 12}
SMALL = {"layers": 4, "heads": 4, "width": 256, "context": 256, "vocabulary": 1024, "batch": 8}
DEEP = {"layers": 8, "heads": 8, "width": 512, "context": 512, "vocabulary": 8192, "batch": 4}
WIDE = {"layers": 12, "heads": 12, "width": 768, "context": 1024, "vocabulary": 50304, "batch": 2}


def gpt(sizes, dtype="bfloat16", remat=True, **options):
    return subject.subject("gpt", dtype=dtype, remat=remat, **sizes, **options)


def varied(kind, sizes, dtype, recipe):
    """A GPT with adapters, one with experts, or one of unscanned layers, checkpointed as `kind` says."""
    if kind == "experts":
        return gpt(sizes, dtype, experts=4)
    if kind == "lora":
        of, options = gpt(sizes, dtype), {"lora": fp8jax.LoRA(rank=8)}
    else:
        of, options = gpt(sizes, dtype, remat=False), {"gradient_checkpointing": kind}
        of = of._replace(model=of.model.clone(scan=False))
    return of._replace(model=fp8jax.transform(of.model, recipe, **options))


def needs_target(target):
    if target is not None and (reason := targets.why_not()):
        pytest.skip(reason)


def planned(of, recipe, **options):
    return memory.plan(of.model, recipe, *of.inputs, loss=of.loss, **options)


def step_of(of, recipe, zero):
    """A jitted training step's function, and the shapes of its arguments."""
    model = of.model if hasattr(of.model, "recipe") else fp8jax.transform(of.model, recipe)
    tx = fp8jax.optim.adamw(1e-3, recipe, zero=zero)
    devices = 1 if zero is None else zero.devices
    batch = [jax.ShapeDtypeStruct((x.shape[0] * devices, *x.shape[1:]), x.dtype) for x in of.inputs]

    def init(key):
        variables = model.init(key, *(jnp.zeros(x.shape, x.dtype) for x in of.inputs))
        variables = variables if zero is None else zero.place(variables)
        return variables, tx.init(variables)

    def step(variables, opt_state, *batch):
        loss_fn = lambda variables, *batch: of.loss(model.apply(variables, *batch), *batch)  # noqa: E731
        loss, grads = fp8jax.value_and_grad(loss_fn, zero=zero)(variables, *batch)
        updates, opt_state = tx.update(grads, opt_state, variables)
        return fp8jax.apply_updates(variables, updates), opt_state, loss

    return init, step, batch


def placed(zero, variables, opt_state, batch):
    """The shapes with the shardings that ZeRO gives them, for a compiler that has no arrays."""

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


def compiled(of, recipe, target=None, devices=1, stage=0):
    """The program that is predicted."""
    if devices == 1:
        init, step, batch = step_of(of, recipe, None)
        args = (*jax.eval_shape(init, jax.random.key(0)), *batch)
        if target is not None:
            return program.read(targets.compile_for(step, *args, target=target, donate_argnums=(0, 1)))
    else:
        here = Mesh(np.array(jax.devices()[:devices]), ("devices",))
        zero = Zero(here if target is None else targets.mesh(target, devices), recipe, stage)
        init, step, batch = step_of(of, recipe, zero)
        args = placed(zero, *jax.eval_shape(init, jax.random.key(0)), batch)
    options = None if target is None else targets.COMPILER_OPTIONS
    return program.read(jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile(compiler_options=options))


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


# What is kept ####################################################################################


@pytest.mark.parametrize("recipe, stage", [("O2", 1), long("O3", 3), long("te", 0), long("fp16_amp", 2)])
def test_what_is_kept_is_exact(recipe, stage):
    zero, of = Zero(Mesh(np.array(jax.devices()), ("data",)), recipe, stage), gpt(TINY)
    init, _, _ = step_of(of, recipe, zero)
    variables, opt_state = jax.jit(init)(jax.random.key(0))

    def here(tree):
        shards = (leaf.addressable_shards[0].data for leaf in jax.tree.leaves(tree))
        return sum(shard.nbytes for shard in shards)

    [adam] = (node for node in jax.tree.leaves(opt_state, is_leaf=is_adam_state) if is_adam_state(node))
    plan = planned(of, recipe, devices=zero.devices, stage=stage)
    assert plan.weights == here(variables)
    assert plan.moments == here((adam.adam.mu, adam.adam.nu))
    assert plan.master == here(adam.master)
    [tokens] = of.inputs
    assert plan.kept == here((variables, opt_state)) + tokens.size * tokens.dtype.itemsize


@pytest.mark.long
def test_parts_fall_as_zero_says():
    of = gpt(TINY)
    plans = [planned(of, "O3", devices=8, stage=stage) for stage in range(4)]
    whole = planned(of, "O3")
    assert plans[0].kept == whole.kept
    for plan in plans[1:]:
        assert whole.moments / 8 <= plan.moments < whole.moments / 7
        assert whole.master / 8 <= plan.master < whole.master / 7
    assert plans[1].weights == plans[2].weights == whole.weights
    assert plans[3].weights < whole.weights / 4  # norms, scales and positions' parts
    assert plans[0].total > plans[1].total >= plans[2].total > plans[3].total


@pytest.mark.parametrize("name", ["adamw_8bit", "adafactor"])
def test_on_many_devices_any_optimizer_keeps_what_it_keeps_on_one(name):
    make = {"adamw_8bit": fp8jax.optim.adamw_8bit, "adafactor": fp8jax.optim.adafactor}[name]
    optimizer = lambda rate, recipe, zero: make(rate, recipe)  # noqa: E731
    one, two = (planned(gpt(TINY), "bf16", devices=n, optimizer=optimizer) for n in (1, 2))
    assert two.moments == one.moments > 0 and two.kept == one.kept


# What is predicted ###############################################################################

POINTS = [
    long(TINY, "float32", True, "bf16", None),
    (TINY, "float32", True, "O2", None),
    long(TINY, "bfloat16", True, "O2", "h200"),  # the stage below is there too
    long(NANO, "float32", True, "te", None),
    long(NANO, "float32", True, "O3", None),
    long(NANO, "float32", False, "bf16", None),
    long({**NANO, "batch": 96}, "float32", True, "O2", None),
    long(SMALL, "float32", True, "O1", None),
    long(SMALL, "bfloat16", True, "bf16", None),
    long(DEEP, "bfloat16", True, "O2", None),
    long(NANO, "float32", True, "te", "h200"),
    long({**NANO, "batch": 96}, "float32", True, "O2", "h200"),
    *(long(SMALL, "bfloat16", remat, "O2", "h200") for remat in (True, False)),
    *(long(DEEP, "bfloat16", True, recipe, "h200") for recipe in ("bf16", "te", "O1", "O2", "O3")),
    *(long(WIDE, "bfloat16", True, recipe, "h200") for recipe in ("bf16", "te", "O2")),
    long(WIDE, "bfloat16", False, "O3", "h200"),
    long(SMALL, "bfloat16", True, "O2", "b200"),
]


@pytest.mark.parametrize("sizes, dtype, remat, recipe, target", POINTS)
def test_one_device_is_predicted(sizes, dtype, remat, recipe, target):
    needs_target(target)
    of = gpt(sizes, dtype, remat)
    plan, found = planned(of, recipe, target=target), compiled(of, recipe, target)
    assert plan.kept == found.arguments
    assert plan.total == pytest.approx(found.total, rel=0.1)


LEVELS = ("bf16", "te", "O1", "O2", "O3")


@pytest.mark.parametrize(
    "kind, sizes, dtype, recipe, target",
    [
        ("lora", TINY, "float32", "bf16", None),
        ("experts", {**TINY, "layers": 2}, "float32", "te", None),
        *(long(kind, NANO, "float32", recipe, None) for kind in ("lora", "experts") for recipe in LEVELS),
        *(long(kind, SMALL, "bfloat16", r, "h200") for kind in ("lora", "experts", "full") for r in LEVELS),
        *(long("lora", WIDE, "bfloat16", recipe, "h200") for recipe in ("bf16", "te", "O2", "O3")),
        *(
            long("experts", sizes, "bfloat16", recipe, "h200")
            for sizes in (DEEP, {**SMALL, "layers": 12, "heads": 12, "width": 768})
            for recipe in ("bf16", "te", "O2", "O3")
        ),
        *(long("lora", DEEP, "bfloat16", recipe, None) for recipe in ("bf16", "te", "O2", "O3")),
        *(long("experts", DEEP, "bfloat16", recipe, None) for recipe in ("bf16", "te")),
        *(long("full", NANO, "float32", recipe, None) for recipe in ("bf16", "te")),
        *(long(kind, SMALL, "bfloat16", "te", "h200") for kind in ("none", "dots", "fp8")),
    ],
)
def test_adapters_experts_and_unscanned_layers_are_predicted(kind, sizes, dtype, recipe, target):
    needs_target(target)
    of = varied(kind, sizes, dtype, recipe)
    plan, found = planned(of, recipe, target=target), compiled(of, recipe, target)
    assert plan.kept == found.arguments
    assert plan.total == pytest.approx(found.total, rel=0.1)


@pytest.mark.parametrize(
    "sizes, dtype, recipe, target, devices, stage",
    [
        long(TINY, "float32", "O2", None, 4, 2),
        long(TINY, "bfloat16", "O3", "h200", 8, 3),
        *(long(NANO, "float32", "bf16", None, 2, stage) for stage in range(4)),
        *(long(NANO, "float32", "O2", None, 8, stage) for stage in range(3)),
        *(long(SMALL, "bfloat16", recipe, "h200", 8, n) for recipe in ("bf16", "te", "O2") for n in range(4)),
        *(long(SMALL, "bfloat16", "O2", "h200", devices, 2) for devices in (2, 4)),
    ],
)
def test_every_stage_is_predicted(sizes, dtype, recipe, target, devices, stage):
    needs_target(target)
    of = gpt(sizes, dtype)
    plan = planned(of, recipe, target=target, devices=devices, stage=stage)
    found = compiled(of, recipe, target, devices, stage)
    assert plan.kept == found.arguments
    assert plan.total == pytest.approx(found.total, rel=0.1)
    bytes_of = {"u8": 1, "u16": 2, "bf16": 2, "f32": 4, "s32": 4, "u32": 4}
    times = {"all-reduce": 2.0, "reduce-scatter": float(devices)}
    sent = sum(
        (devices - 1) / devices * times.get(each.kind, 1.0) * each.runs * each.numbers * bytes_of[each.dtype]
        for each in found.collectives
    )
    assert plan.sent == pytest.approx(sent, rel=0.02)


@pytest.mark.parametrize("target", [None, "h200"])
def test_the_planned_gpt_is_the_example(target, load_program):
    example = load_program("examples/gpt_model.py")
    sizes = {name: NANO[name] for name in ("vocabulary", "layers", "heads", "width", "context")}
    of = gpt(NANO, "float32")
    theirs = of._replace(model=example.GPT(example.GPTConfig(**sizes)))
    assert planned(of, "O2", target=target) == planned(theirs, "O2", target=target)


# Small functions, by hand ########################################################################

X = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
FOUR = 4 * 1024 * 1024


def scanned(x):
    return jax.lax.scan(lambda carry, _: (jnp.sin(carry), carry), x, length=3)


BY_HAND = [
    ("a sum of what is computed element by element", lambda x: jnp.sum(jnp.tanh(x) * 2), 0, FOUR),
    ("a result", lambda x: jnp.tanh(x) * 2, 0, 2 * FOUR),
    ("a result in the place of its input", lambda x: jnp.tanh(x) * 2, 1, FOUR),
    ("a product, which cannot be", lambda x: x @ x, 0, 2 * FOUR),
    ("two of them, one after the other", lambda x: (x @ x) @ x, 0, 3 * FOUR),
    ("the second of which is a new one's place", lambda x: ((x @ x) @ x) @ x, 0, 3 * FOUR),
    ("a scan: its stack, its carry, old and new", scanned, 0, 6 * FOUR),
    ("what is not used", lambda x: (x @ x, x + 1)[1], 0, 2 * FOUR),
    ("a slice written in place", lambda x: x.at[0].set(0.0), 1, FOUR),
    ("a slice written into a copy", lambda x: x.at[0].set(0.0), 0, 2 * FOUR),
]


@pytest.mark.parametrize("what, function, donated, expected", BY_HAND, ids=[row[0] for row in BY_HAND])
def test_by_hand(what, function, donated, expected):
    argnums = (0,) if donated else ()
    found = memory.fullest(function, X, donate_argnums=argnums, target=None)
    assert found == pytest.approx(expected, abs=8192), what
    read = program.read(jax.jit(function, donate_argnums=argnums).lower(X).compile())
    assert read.total == pytest.approx(expected, abs=8192), what


def test_a_product_of_codes_reads_codes_and_takes_a_workspace():
    def product(x):
        codes = x.astype(jnp.float8_e4m3fn)
        wide = codes.astype(jnp.bfloat16) * jnp.bfloat16(0.5)
        return jax.lax.dot_general(wide, wide, (((1,), (1,)), ((), ())))

    found = memory.fullest(product, X, target="h200")
    # the input, its codes, the bfloat16 product, cuBLASLt's workspace
    assert found == pytest.approx(FOUR + FOUR / 4 + FOUR / 2 + 32 * 2**20, abs=8192)


def test_a_checkpointed_block_waits_for_its_gradient():
    def block(x):
        return jnp.tanh(jnp.tanh(x @ x) @ x)

    def peak(block):
        loss = lambda x: jnp.sum(block(block(block(block(x)))))  # noqa: E731
        return memory.fullest(jax.grad(loss), X, target="h200")

    # Of each block but the one in work its input is kept, not the product within it.
    assert peak(block) - peak(jax.checkpoint(block)) == pytest.approx(3 * FOUR, abs=8192)


# Models ##########################################################################################


class Perceptron(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(256, 512, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(512, 256, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(nnx.gelu(self.up(x))))


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(256)(nn.gelu(nn.Dense(512)(x)))


def test_an_nnx_module_needs_what_a_linen_module_does():
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    of_arrays = memory.plan(Perceptron(nnx.Rngs(0)), "O2", x, devices=2, stage=2)
    of_shapes = memory.plan(nnx.eval_shape(lambda: Perceptron(nnx.Rngs(0))), "O2", x, devices=2, stage=2)
    linen = memory.plan(Dense(), "O2", x, devices=2, stage=2)
    assert of_arrays == of_shapes
    assert (of_arrays.weights, of_arrays.moments) == (linen.weights, linen.moments)
    assert of_arrays.sent == linen.sent


def test_a_loss_function_is_planned_as_its_model():
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    model = fp8jax.transform(Dense(), "O2")
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 256))))
    loss_fn = lambda variables, x: jnp.mean(jnp.square(model.apply(variables, x)))  # noqa: E731
    assert memory.plan(loss_fn, "O2", x, variables=variables) == memory.plan(Dense(), "O2", x)


def test_what_cannot_be_planned_raises():
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    with pytest.raises(TypeError, match="`model`: expected a Flax module"):
        memory.plan(jnp.sin, "O2", x)
    with pytest.raises(ValueError, match="`target`: expected one of h100"):
        memory.plan(Dense(), "O2", x, target="h300")
    with pytest.raises(ValueError, match="`devices`: expected a positive number"):
        memory.plan(Dense(), "O2", x, devices=0)
    with pytest.raises(ValueError, match="`stage`: expected 0, 1, 2 or 3"):
        memory.plan(Dense(), "O2", x, devices=2, stage=4)


def test_papers_settings_are_arithmetic_of_plans():
    setting = paper.Setting("gpt-125m", 2, 3, 4, "O2", 1, 0.0, 0.0)
    of = subject.subject("gpt-125m", layers=4)
    whole = planned(of, "O2", target="h100", devices=4, stage=1)
    one = paper.on_one(setting)
    assert one.weights == whole.weights // 2 and one.activations == whole.activations * 3 // 2
