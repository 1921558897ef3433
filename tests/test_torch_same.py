"""One training on torch and in JAX: the same model, data and recipe give the same losses but for rounding.

Without FP8 losses stay within a few units in their last place. In FP8 rounding is no small thing: a sum that
is one bit off moves a value across the boundary of two codes, an eighth apart; the loss then differs by 1e-4
or so, from the first step on or from the fiftieth, and by more as the runs go their own ways. How far, says a
referee: the same run on the same side with its sums in other orders (channels and rows permuted), a change
that exact arithmetic would not notice. When the first code differs is chance, and so is where the runs go
then: referees differ by ten times among each other. So what is compared is the largest distance and the mean
one of a run: torch's and JAX's are at most three times those of the furthest of ten referees, eight in JAX
and two on torch. (Of twelve runs, at O2, te and O3, either was 0.2 to 2.7 times that.)
"""

import functools
import json

import corpus
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax import optim

torch = pytest.importorskip("torch", reason="the example needs torch")
pytest.importorskip("transformers", reason="the example's model is of transformers")

import fp8jax_torch  # noqa: E402

STEPS = 100
CROSS, END = 20, 50  # of the runs that change sides
SIZES = {"layers": 2, "heads": 2, "width": 32, "context": 16, "batch": 4}
FACTOR = 3
# One step's loss, of 4, is a mean of 64 numbers: a few units in its last place, 4.8e-7.
ROUNDING = 3e-6
A_FEW_CODES = 1e-3  # of the loss, in the first steps: see above
# Each takes a compilation.
RECIPES = ["O2", *(pytest.param(name, marks=pytest.mark.long) for name in ("te", "fp32", "O3"))]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """So small a model is slower on many."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text(corpus.standard_library(30_000), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def example(load_program):
    """The example; its programs are compiled once for each recipe."""
    example, made = load_program("examples/torch_same_recipe.py"), {}
    compiled = example.Program

    def program(config, vocabulary):
        if config.recipe not in made:
            made[config.recipe] = compiled(config, vocabulary)
        return made[config.recipe]

    example.Program = program
    return example


class Training:
    """Runs of one recipe, each from its start."""

    def __init__(self, example, text, recipe):
        self.example, self.vocabulary = example, len(text.vocabulary)
        self.config = example.Config(recipe=recipe, steps=STEPS, **SIZES)
        self.program = example.Program(self.config, self.vocabulary)
        rows = corpus.RandomWindows(text.train, SIZES["context"], SIZES["batch"], STEPS, seed=0)
        self.batches = [rows.step(step) for step in range(1, STEPS + 1)]

    def on_torch(self):
        return self.example.OnTorch(self.config, self.vocabulary, self.config.recipe)

    def in_jax(self):
        return self.example.InJax(self.program, self.program.start(self.on_torch()))

    def losses(self, side, first=0, last=STEPS, rows=slice(None)):
        return np.array([side.step(batch[rows]) for batch in self.batches[first:last]])


@pytest.fixture(scope="module")
def training(example, path):
    return functools.cache(functools.partial(Training, example, corpus.load(str(path))))


@pytest.fixture
def permute(example, monkeypatch):
    """Has the model's channels in another order from now on: all is the same but the order of sums."""
    plain = example.hugging_face

    def permuted(seed, config, vocabulary):
        model = plain(config, vocabulary)
        order = torch.randperm(config.width, generator=torch.Generator().manual_seed(seed))
        for name, parameter in model.named_parameters():
            if name.endswith(("c_attn.weight", "c_fc.weight")):
                parameter.data = parameter.data[order]
            elif not name.endswith(("c_attn.bias", "c_fc.bias")):
                parameter.data = parameter.data[..., order]
        return model

    return lambda seed: monkeypatch.setattr(example, "hugging_face", functools.partial(permuted, seed))


def check_within(distance, referees):
    """The largest and the mean distance are at most `FACTOR` times the furthest referee's."""
    referees = np.stack(referees)
    assert distance.max() <= FACTOR * referees.max() + ROUNDING
    assert distance.mean() <= FACTOR * referees.mean(1).max() + ROUNDING


@pytest.mark.long  # a dozen runs; that a run can change sides shows the same in small
@pytest.mark.parametrize("recipe", RECIPES[:2])
def test_distance_of_torch_and_jax(training, permute, recipe):
    runs = training(recipe)
    on_torch, in_jax = runs.losses(runs.on_torch()), runs.losses(runs.in_jax())
    referees = []
    for seed in range(8):
        permute(seed)
        rows = np.random.default_rng(seed).permutation(SIZES["batch"])
        referees.append(abs(runs.losses(runs.in_jax(), rows=rows) - in_jax))
        if seed < 2:
            referees.append(abs(runs.losses(runs.on_torch(), rows=rows) - on_torch))
    distance = abs(on_torch - in_jax)
    assert on_torch[-10:].mean() < on_torch[0] - 0.5
    check_within(distance, referees)


@pytest.mark.long  # the example changes sides too, and the test below
@pytest.mark.parametrize("recipe", RECIPES)
def test_change_of_sides(training, recipe):
    runs = training(recipe)
    on_torch, in_jax = runs.on_torch(), runs.in_jax()
    runs.losses(on_torch, last=CROSS)
    runs.losses(in_jax, last=CROSS)
    to_jax, to_torch = runs.program.take(on_torch), runs.on_torch().take(in_jax.state)
    stayed = [runs.losses(side, CROSS, END) for side in (on_torch, in_jax)]
    crossed = [runs.losses(side, CROSS, END) for side in (runs.example.InJax(runs.program, to_jax), to_torch)]
    # The two have their distance anyway; a run that changed sides keeps within it.
    referees = [abs(stayed[0] - stayed[1])]
    # Who loses the moments on the way is seen.
    forgetful = to_jax._replace(opt_state=runs.program.start(runs.on_torch()).opt_state)
    lost = abs(runs.losses(runs.example.InJax(runs.program, forgetful), CROSS, END) - stayed[0])
    assert lost.mean() > FACTOR * referees[0].mean() + ROUNDING
    for before, after in zip(stayed, crossed, strict=True):
        assert abs(before - after)[0] <= A_FEW_CODES
        check_within(abs(before - after), referees)


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES[:2])
def test_steps_and_skipped_steps_cross(training, recipe, monkeypatch):
    """At te with our AdamW; torch's own skips no step and counts none."""
    ours = functools.partial(fp8jax_torch.optim.AdamW, recipe=recipe)
    monkeypatch.setattr(torch.optim, "AdamW", ours)
    runs = training(recipe)
    side = runs.on_torch()
    runs.losses(side, last=3)
    side.optimizer.zero_grad()
    (side.loss(runs.batches[3]) * torch.nan).backward()
    side.optimizer.step()
    in_jax = runs.example.InJax(runs.program, runs.program.take(side))
    assert side.skipped == in_jax.skipped == 1
    expected, got = runs.losses(side, 4, 6), runs.losses(in_jax, 4, 6)
    np.testing.assert_allclose(got, expected, atol=A_FEW_CODES)
    back = runs.on_torch().take(in_jax.state)
    assert back.skipped == 1 and {int(state["step"]) for state in back.optimizer.state.values()} == {5}
    wte = in_jax.state.variables["params"]["wte"]
    spoilt = {**in_jax.state.variables["params"], "wte": jax.tree.map(lambda x: x * jnp.nan, wte)}
    variables = {**in_jax.state.variables, "params": spoilt}
    bad, _ = runs.program.step(in_jax.state._replace(variables=variables), runs.batches[6])
    again = runs.on_torch().take(in_jax.state._replace(opt_state=bad.opt_state))
    assert int(optim.skipped(bad.opt_state)) == again.skipped == 2


@pytest.mark.long  # compiles the step at te; tests/test_torch_bridge.py has the state alone
def test_torchs_adamw_crosses_and_comes_back(training):
    runs = training("te")
    side = runs.on_torch()
    runs.losses(side, last=3)
    back = runs.on_torch().take(runs.program.take(side))
    assert all(isinstance(one.optimizer, torch.optim.AdamW) for one in (side, back))
    for new, old in zip(*(one.optimizer.state.values() for one in (back, side)), strict=True):
        assert int(new["step"]) == 3 and all(torch.equal(new[name], old[name]) for name in old)
    assert runs.losses(back, 3, 5).tolist() == runs.losses(side, 3, 5).tolist()


def test_the_example_runs(example, path, tmp_path, capsys):
    sizes = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]
    options = ["--data", str(path), "--out", str(tmp_path / "out"), "--steps", "2", "--cross", "1"]
    assert example.main([*options, *sizes]) == 0
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [len(run["losses"]) for run in result["runs"].values()] == [2, 2, 2, 2, 1, 1]
    first, second, reordered, _, over, back = (run["losses"] for run in result["runs"].values())
    for other in (second, reordered, [first[0], *over], [first[0], *back]):
        np.testing.assert_allclose(other, first, atol=A_FEW_CODES)
    kept = result["runs"]["torch"]["bytes_per_parameter"], result["runs"]["JAX"]["bytes_per_parameter"]
    np.testing.assert_allclose(*(list(sizes.values())[:3] for sizes in kept), rtol=0.01)
    assert "|torch - JAX|" in printed
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"result.json", "table.txt", "losses.png"}


@pytest.mark.parametrize(
    "options, says",
    [
        (["--cross", "300"], "--cross 300 leaves no steps of --steps 300"),
        (["--plain", "O1"], "--plain must be one of fp32, bf16; got O1"),
        (["--recipe", "O9"], "O9"),
        (["--backend", "tea"], "expected one of auto, msamp, te, torchao, native; got 'tea'"),
    ],
)
def test_input_errors_are_one_line(example, path, capsys, options, says):
    assert example.main(["--data", str(path), *options]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("torch_same_recipe: ") and says in printed and printed.count("\n") == 1
