"""`fp8jax.advise` and its command: planted bad layers are named, and following the advice helps."""

import functools
import json
import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
import runs
from flax import nnx

import fp8jax
from fp8jax import Rule, cli
from fp8jax.cli import commands
from fp8jax.inspect import memory, numerics, subject
from fp8jax.inspect.memory import fitting
from fp8jax.rewrite.patterns import Layer

WIDTH = 32
OUTLIERS = jnp.array([3, 17])
DEFECTS = ("outliers", "tiny")


class Model(nn.Module):
    """Two channels of the layer "second" are 1e6 times the others, or most outputs of "head2" count 1e-11."""

    defect: str | None

    @nn.compact
    def __call__(self, x):
        scale = jnp.ones((1, WIDTH)).at[:, OUTLIERS].set(1e6 if self.defect == "outliers" else 1.0)
        x = nn.gelu(nn.Dense(WIDTH, name="first")(x))
        x = nn.gelu(nn.Dense(WIDTH, name="second")(x * scale))
        return nn.Dense(WIDTH, name="head2")(nn.gelu(nn.Dense(WIDTH, name="third")(x)))


BAD = {"outliers": "second", "tiny": "head2"}
PATHS = ["re:fc", "re:other"]  # of `row`


def data(seed):
    of_x, of_w = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(of_x, (256, WIDTH))
    return x, jnp.tanh(x @ jax.random.normal(of_w, (WIDTH, WIDTH)) / WIDTH**0.5)


def loss_of(model, defect):
    factors = jnp.ones((1, WIDTH)).at[:, 4:].set(1e-11 if defect == "tiny" else 1.0)
    return lambda variables, x, y: jnp.mean(jnp.square(model.apply(variables, x) - y) * factors)


def first_of(model, defect, seed, x):
    """Variables; outlier channels have no weights behind them."""
    variables = model.init(jax.random.key(seed), x)
    return masked(variables, defect)


def masked(variables, defect):
    if defect != "outliers":
        return variables
    params = dict(variables["params"])
    params["second"] = {**params["second"], "kernel": params["second"]["kernel"].at[OUTLIERS].set(0)}
    return {**variables, "params": params}


@functools.cache
def measure(defect):
    return jax.jit(fp8jax.statistics(loss_of(Model(defect), defect), ["current"]))


def found(defect, seed):
    x, y = data(seed)
    return measure(defect)(first_of(Model(defect), defect, seed, x), x, y)


def trained(model, defect, seed, steps=150):
    """The unweighted loss after training by Adam, which makes up for tiny gradients."""
    (x, y), tx = data(seed), optax.adam(3e-3, eps=1e-16)
    variables = first_of(model, defect, seed, x)

    def step(carry, _):
        variables, state = carry
        _, grads, variables = fp8jax.value_and_grad(loss_of(model, defect))(variables, x, y)
        updates, state = tx.update(grads, state, variables["params"])
        return (masked(fp8jax.apply_updates(variables, updates), defect), state), None

    train = jax.jit(lambda carry: jax.lax.scan(step, carry, None, length=steps)[0])
    variables, _ = train((variables, tx.init(variables["params"])))
    return float(jnp.mean(jnp.square(model.apply(variables, x) - y)))


@pytest.mark.parametrize("defect", [*DEFECTS, None])
@pytest.mark.parametrize("seed", range(10))
def test_planted_layers_are_named(defect, seed):
    advice = fp8jax.advise(found(defect, seed), target="h100", recipe="current")
    assert advice.rules == (() if defect is None else (Rule(f"re:{BAD[defect]}"),))
    assert "dB" in advice.reasons[0] and ("no layer" in advice.reasons[0]) == (defect is None)


@pytest.mark.parametrize("defect", DEFECTS)
def test_following_the_advice_closes_the_gap(defect):
    advice = fp8jax.advise(found(defect, 0), target="h100", recipe="current")
    plain, fp8, advised = (
        trained(model, defect, 0)
        for model in (
            Model(defect),
            fp8jax.transform(Model(defect), advice.recipe),
            fp8jax.transform(Model(defect), advice.recipe, rules=advice.rules),
        )
    )
    assert fp8 > 1.5 * plain
    assert advised - plain < (fp8 - plain) / 5


def test_a_transformed_models_own_recipe_and_rules():
    """A layer that a rule already keeps out of FP8 is not advised again."""
    x, y = data(0)

    def advice(rules):
        model = fp8jax.transform(Model("outliers"), "te", rules=rules)
        measured = fp8jax.statistics(loss_of(model, "outliers"), ["te"])
        return fp8jax.advise(measured(first_of(model, "outliers", 0, x), x, y), target="h100")

    bad = advice(())
    assert (bad.recipe, bad.rules) == ("te", (Rule("re:second"),))
    assert advice(bad.rules).rules == bad.rules


@pytest.mark.parametrize("bad", ["out", "block/out", "h[0]", "block/h[0]"])
def test_a_rule_names_one_layer(bad):
    paths = ["out", "block/out", "h[0]", "h0", "block/h[0]", "block/h0"]
    found = [row(layer=path, weak=64 * (path == bad)) for path in paths]
    [rule] = fp8jax.advise(found, target="h100").rules
    assert [path for path in paths if rule.fits(Layer(path, None, (64, 64), (), path))] == [bad]
    assert rule.path == bad or bad != "block/out"


def two_layers(params, x):
    return jnp.tanh(x @ params["a"]) @ params["b"]


PARAMS = {name: jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) / 6 for i, name in enumerate("ab")}
LAST = Rule(where=lambda layer: layer.path == "b")


@pytest.mark.parametrize(
    ("recipe", "rules", "outlier", "advised", "in_fp8", "says"),
    [
        ("current", [Rule("b", "margin=90")], 1, [Rule("re:b")], "a", "with te,scaling=current,margin=90"),
        ("current", [Rule("*", "margin=90")], 1, [Rule("re:a"), Rule("re:b")], "", "current,margin=90"),
        ("current", [Rule("a", "block")], 1, [Rule("a", "block")], "ab", "no layer of 2 is bad"),
        ("current", [Rule("b", "te")], 1e6, [Rule("re:a"), Rule("b", "te")], "b", "with current"),
        ("current", [LAST], 1e6, [Rule("re:a"), Rule("re:b")], "", "with current"),
        ("bf16", [Rule("b", "current")], 1e6, [Rule("b", "current")], "b", "no layer of 1 is bad"),
        ("bf16", [], 1e6, [Rule("re:a")], "b", "with current"),
        (None, [Rule("b")], 1e6, [Rule("re:a"), Rule("b")], "", "with current"),
    ],
)
def test_rules_of_the_model_stay(recipe, rules, outlier, advised, in_fp8, says, tmp_path):
    """Layers are judged under their own recipes. The text, and the rows of a file, have the rules, too."""
    x = data(0)[0].at[:, OUTLIERS].multiply(outlier)
    model, variables, of_plain = two_layers, PARAMS, rules
    if recipe is not None:
        transformed = fp8jax.transform(two_layers, recipe, rules=rules)
        model, variables, of_plain = transformed.apply, transformed.init(PARAMS, x), ()
    loss = lambda variables, x: jnp.mean(model(variables, x) ** 2)  # noqa: E731
    found = jax.jit(fp8jax.statistics(loss, ["current"], rules=of_plain))(variables, x)
    advice = fp8jax.advise(found, target="l40s")  # which has no block GEMMs
    assert list(advice.rules) == advised and says in advice.reasons[0]
    found.save(tmp_path / "found.json")
    for same in (found.rows, numerics.load(tmp_path / "found.json"), found.merged(found)):
        assert fp8jax.advise(same, target="l40s") == advice
    scope = {"model": two_layers, "fp8jax": fp8jax}
    exec(str(advice), scope)
    assert "".join(row.path for row in scope["model"].report(PARAMS, x).rows if row.fp8) == in_fp8


FAR = "te,scaling=current,margin=90"  # all underflows


@pytest.mark.parametrize(
    ("recipe", "rule", "bad"), [("block", Rule("a", FAR), 1), (FAR, Rule("a", FAR), 1), (FAR, Rule("a"), 0)]
)
def test_rules_of_the_model_hold_under_another_recipe(recipe, rule, bad):
    """Advice keeps a rule, so that it judges the layer by the rule's recipe, in "what if" lines as well."""
    x = data(0)[0]
    model = fp8jax.transform(two_layers, recipe, rules=[rule])
    loss = lambda variables, x: jnp.mean(jnp.exp(model.apply(variables, x)))  # noqa: E731
    found = jax.jit(fp8jax.statistics(loss, ["mxfp8", "block"]))(model.init(PARAMS, x), x)
    advice = fp8jax.advise(found, target="b200", recipe="mxfp8")
    assert advice.rules == ((Rule("re:a"),) if bad else (rule,))
    assert f"with {FAR}" in advice.reasons[0] or not bad
    assert f"what if block: {bad} of 2 layers are bad, mxfp8 has {bad}" in advice.reasons
    with pytest.raises(ValueError, match="`recipe`: expected one in FP8 that `found` has measured"):
        fp8jax.advise(found, recipe="current", target="h100")


def test_text_runs():
    advice = fp8jax.advise(found("tiny", 0).rows, target="h100", recipe="current")
    scope = {"model": Model("tiny"), "fp8jax": fp8jax}
    exec(str(advice), scope)
    report = scope["model"].report(data(0)[0])
    assert [row.path for row in report.rows if not row.fp8] == ["head2"]


def test_advise_ignores_own_rows_of_other_recipe():
    """They have the model's scaling state, as no other recipe."""
    rows = [row(recipe="te", is_own=True, saturation=0.5), row(recipe="mxfp8")]
    assert not fp8jax.advise(rows, target="b200", recipe="mxfp8").rules
    assert fp8jax.advise(rows, target="b200").rules == (Rule("re:fc"),)


def test_layers_with_stale_scales_alone_get_no_rule():
    own = {"recipe": "te", "is_own": True}
    rows = [row(saturation=0.5, **own), row(layer="other", weak=64, **own)]
    assert [rule.path for rule in fp8jax.advise(rows, target="h100").rules] == PATHS
    fresh = [row(weak=1), row(layer="other", weak=60)]
    advice = fp8jax.advise([*rows, *fresh], target="h100")
    assert [rule.path for rule in advice.rules] == PATHS[1:]
    assert advice.reasons[-1].startswith("scaling=current: delayed scales alone make 1 of 2 layers bad")
    advice = fp8jax.advise([rows[0], fresh[0]], target="h100")
    assert not advice.rules and "at most 1 of 64 channels" in advice.reasons[0]


def row(**changes):
    given = ("fc", (), "input", "te,scaling=current", False, 1.0, 0.0, 0.0, 31.0, 15.0, 0, 0, 64)
    return numerics.OperandRow(*given)._replace(**changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"amax": math.inf}, "NaN or infinities"),
        ({"saturation": 0.01}, "1.00% saturate"),
        ({"weak": 7, "outliers": 2, "underflow": 0.5}, "7 of 64 channels below 10 dB, 50.0% underflow"),
        ({"weak": 6, "underflow": 0.5, "outliers": 9}, None),
    ],
)
def test_faults(changes, text):
    advice = fp8jax.advise([row(**changes), row(layer="other")], target="h100")
    assert [rule.path for rule in advice.rules] == (PATHS[:1] if text else [])
    assert text is None or text in advice.reasons[0]


@pytest.mark.parametrize(
    ("amaxes", "text"),
    [
        ([1, 1.5, 1.4], "amax_history_len=1"),
        ([4, 1, 3.9], "amax_history_len=16"),
        ([1, 1, 8], "scaling=current: an amax is at most 8.00 times"),
    ],
)
def test_amaxes_of_a_run(amaxes, text):
    series = [[row(amax=amax)] for amax in amaxes]
    assert fp8jax.advise(series, target="h100").reasons[-1].endswith(text) or text.startswith("scaling")
    assert text in fp8jax.advise(series, target="h100").reasons[-1]
    assert not any("scaling=" in reason for reason in fp8jax.advise(series[:1], target="h100").reasons)


def test_window_with_rows_of_more_recipes():
    """Recipes with the same cast have the same amaxes, once for each batch."""
    recipes = ["te,scaling=current", "te", "te,fp8_format=E4M3", "O2"]
    series = [[row(recipe=recipe, amax=amax) for recipe in recipes] for amax in 4 * [10, *[1] * 6]]
    assert fp8jax.advise(series, target="h100", recipe="te").reasons[-1].endswith("amax_history_len=16")


def test_recipe_by_gpu():
    rows = [row(recipe=str(fp8jax.Recipe.parse(name))) for name in ("current", "mxfp8", "block")]
    chosen = [fp8jax.advise(rows, target=target).recipe for target in ("h100", "b200", "l40s")]
    assert chosen == ["current", "mxfp8", "current"]
    bad = [each._replace(weak=64) if "current" in each.recipe else each for each in rows]
    advice = fp8jax.advise(bad, target="h100")
    assert advice.recipe == "block"
    assert "what if current: 1 of 1 layers are bad, block has 0" in advice.reasons
    assert [numerics.recipe_for(name) for name in ("h100", "b200")] == ["fp8", "mxfp8+fp8"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([],), "`found`: expected statistics"),
        (([row(recipe="nvfp4")],), "`found`: expected rows of mxfp8, current, block"),
        (([row(recipe="nvfp4"), row(operand="weight gradient")],), "`found`: expected rows of mxfp8"),
        (([row()], "O2,fp8_format=E4M3,margin=1"), "`recipe`: expected one in FP8"),
        (([row()], "bf16"), "`recipe`: expected one in FP8"),
    ],
)
def test_errors(arguments, text):
    found, *recipe = arguments
    with pytest.raises(ValueError, match=text):
        fp8jax.advise(found, target="h100", recipe=recipe[0] if recipe else None)


def planned_of(base, each):
    """A plan in place of the compiled one: its peak grows with the batch."""

    def plan(model, recipe, tokens, *, devices, stage, **_):
        total = base // stage if stage else base
        return memory.MemoryPlan(str(recipe), stage, devices, total, 0, 0, 0, each * tokens.shape[0], 0)

    return plan


@pytest.mark.parametrize(
    ("base", "each", "devices", "stage", "batch"),
    [(20, 4, 8, 2, 16), (20, 60, 8, 2, 1), (180, 10, 8, 3, 1), (20, 0.1, 1, 0, 64)],
)
def test_stage_and_batch_that_fit(base, each, devices, stage, batch, monkeypatch, capsys):
    """At most 90% of the 85 GB of an H100; `base` GB are divided by the stage."""
    monkeypatch.setattr(fitting, "plan", planned_of(int(base * 1e9), int(each * 1e9)))
    sizes = ["--layers=1", "--width=64", "--heads=1", "--context=32"]
    assert cli.main(["advise", "--model=gpt", *sizes, f"--devices={devices}", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert f"batch {batch} on each of {devices}, ZeRO stage {stage}" in printed["reasons"][0]
    first, second, *_ = printed["text"].splitlines()
    assert first == 'model = fp8jax.transform(model, "fp8", gradient_checkpointing="dots_fp8")'
    if devices > 1:
        assert second.startswith("zero = fp8jax.comm.Zero(") and second.endswith(f", stage={stage})")
    else:
        assert second.startswith("# ")


@pytest.mark.parametrize("kind", ["shapes", "function"])
def test_a_module_of_shapes_and_a_function_fit(kind, monkeypatch):
    """Neither has arrays, and none are computed."""
    plan = planned_of(20, 4)
    monkeypatch.setattr(
        fitting, "plan", lambda model, recipe, *inputs, **where: plan(model, recipe, inputs[-1], **where)
    )
    layer = nnx.eval_shape(lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    models = {"shapes": (layer, (x,)), "function": (lambda w, x: x @ w, (x, x))}
    of = subject.Subject(*models[kind], subject.mean_square)
    assert memory.fit("fp8", lambda batch: of, target="h100", batch=8, checkpointing="none").batch == 8


def test_no_batch_of_0(monkeypatch, capsys):
    monkeypatch.setattr(fitting, "plan", planned_of(20, 4))
    assert cli.main(["advise", "--model=gpt", "--batch=0"]) == 2
    assert "`model`: expected positive sizes" in capsys.readouterr().err


def test_the_help_says_the_defaults(capsys):
    assert runs.status_of(["advise", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "inputs being one device's (default none)" in text and "(fn, (params, *inputs))" in text
    assert "on each device (default the most that fit, up to 64)" in text
    assert "h200, b200 or l40s; by default h100" in text


def test_an_error_of_ours_without_a_model(monkeypatch):
    """It is not taken for an error of the user's model."""

    def fails(args):
        raise KeyError("ours")

    monkeypatch.setattr(commands, "run_advise", fails)
    with pytest.raises(KeyError, match="ours"):
        cli.main(["advise", "--statistics", "found.json"])


def test_the_advice_on_the_page_runs(root):
    """The page shows what the command prints, but for the figure, and the lines train on 8 devices."""
    [shown] = re.findall("```py\n(.*?)```", (root / "docs/guides/numerics.md").read_text(), re.DOTALL)
    [figure] = re.findall("# (.* GB on each GPU.*)", shown)
    assert f"{numerics.Advice('fp8', (), ()).planned(8, 2, 'dots_fp8', figure)}\n" == shown
    block = lambda: nn.Sequential([nn.Dense(32), nn.gelu])  # noqa: E731
    names = {"fp8jax": fp8jax, "jax": jax, "model": nn.Sequential([block(), block()])}
    exec(shown, names)
    tx, value_and_grad = eval(
        re.findall("in the loop: (.*)", shown)[0],
        names | {"loss_fn": lambda variables, x: jnp.mean(names["model"].apply(variables, x) ** 2)},
    )
    variables = names["zero"].place(names["model"].init(jax.random.key(0), jnp.ones((32, 32))))
    opt_state, losses, step = tx.init(variables["params"]), [], jax.jit(value_and_grad)
    for _ in range(5):
        loss, grads, variables = step(variables, jnp.ones((32, 32)))
        updates, opt_state = tx.update(grads, opt_state, variables["params"])
        variables, losses = fp8jax.apply_updates(variables, updates), [*losses, float(loss)]
    assert losses[-1] < losses[0] and names["zero"].stage == 2
    mu = jax.tree.leaves(fp8jax.optim.moments(opt_state)[0])
    assert any(len(leaf.sharding.device_set) == 8 and not leaf.sharding.is_fully_replicated for leaf in mu)


def without_blocks():
    return nn.Dense(WIDTH), jnp.ones((16, WIDTH))


def test_a_model_without_repeated_blocks(monkeypatch, capsys):
    """It is planned without gradient checkpointing, and the advice says so."""

    def plan(model, recipe, x, **options):
        model.apply(model.init(jax.random.key(0), x), x)
        return planned_of(0, 4)(model, recipe, x, devices=1, stage=0)

    monkeypatch.setattr(fitting, "plan", plan)
    assert cli.main(["advise", "--model", f"{__name__}:without_blocks"]) == 0
    first, figure, *_ = capsys.readouterr().out.splitlines()
    assert first == 'model = fp8jax.transform(model, "fp8")'
    assert figure.endswith("; no gradient checkpointing: no module with layers repeats in the model")


def test_nothing_fits(monkeypatch, capsys):
    monkeypatch.setattr(fitting, "plan", planned_of(10**12, 1))
    assert cli.main(["advise", "--model=gpt", "--layers=1", "--devices=8"]) == 2
    assert "Take more devices" in capsys.readouterr().err


def test_command_with_statistics(tmp_path, capsys):
    path = tmp_path / "found.json"
    found("tiny", 0).save(path)
    assert cli.main(["advise", "--statistics", str(path), "--recipe", "current"]) == 0
    line, reason, *_ = capsys.readouterr().out.splitlines()
    assert line == "model = fp8jax.transform(model, \"current\", rules=[fp8jax.Rule('re:head2')])"
    assert reason.startswith("# head2: output gradient: ")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "expected --model, --statistics or both"),
        (["--statistics", "f", "--layers=2"], "--layers is for --model"),
        (["--statistics", "no.json"], "no.json"),
        (["--model", "gpt", "--target", "tpu"], "`target`: expected one of"),
    ],
)
def test_command_errors(options, text, capsys):
    assert runs.status_of(["advise", *options]) == 2
    assert text in capsys.readouterr().err


def test_llama_has_its_parameters():
    """8.03 billion, as the paper says."""
    of = subject.subject("llama-8b")
    model = subject.transformed(of.model, "bf16")
    _, (variables, *_) = subject.loss_of(model, of.inputs, of.loss)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables["params"]))
    assert count == pytest.approx(8.03e9, rel=2e-3)
