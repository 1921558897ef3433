"""examples/generate.py: a cache changes no token, and an export says the tokens of the model."""

import jax
import numpy as np
import pytest
import runs

import fp8jax
from fp8jax.checkpoints import load, save

SIZES = {"layers": 2, "heads": 2, "width": 32, "context": 24}
PROMPT = np.random.default_rng(0).integers(0, 65, (3, 5))


@pytest.fixture(scope="module")
def program(load_program):
    return load_program("examples/generate.py")


def made(program, recipe, scan):
    """A GPT with logits that differ, its transformed models without and with a cache, and variables."""
    module = program.GPT(program.GPTConfig(65, **SIZES, scan=scan))
    plain, cached = (fp8jax.transform(each, recipe) for each in (module, program.cached(module)))
    variables = plain.init(jax.random.key(0), PROMPT)
    params = jax.tree.map(lambda x: 8 * x, plain.dequantize(variables)["params"])
    return module, plain, cached, plain.quantize({"params": params}, like=variables)


@pytest.mark.parametrize("recipe, scan", [("te", True), ("block", False)])
def test_cached_tokens(program, recipe, scan):
    """Each token is the most probable one after all tokens before it, computed without a cache."""
    _, plain, cached, variables = made(program, recipe, scan)
    got = program.generate(cached, variables, PROMPT, 19)
    whole = np.concatenate([PROMPT, got], 1)
    want = jax.jit(plain.apply)(variables, whole).argmax(-1)
    assert (whole[:, 5:] == want[:, 4:-1]).all()
    assert len(np.unique(got)) > 5


@pytest.mark.parametrize("recipe, format, scan", [("O3", "fp8", True), ("block", "fp8:ue8m0", False)])
def test_an_export_says_the_same_tokens(program, tmp_path, recipe, format, scan):
    module, plain, cached, variables = made(program, recipe, scan)
    options = {"mapping": program.names_of(module), "config": program.hugging_face_config(module)}
    report = save(tmp_path / "out", plain, variables, PROMPT, format=format, **options)
    assert all(row.is_unchanged for row in report.rows)
    like = {**variables, "params": jax.eval_shape(lambda: variables["params"])}
    served = load(tmp_path / "out", like=like, mapping=program.names_of(module))
    tokens = program.generate(cached, variables, PROMPT, 12)
    assert (program.generate(cached, served, PROMPT, 12) == tokens).all() and len(np.unique(tokens)) > 5


def test_too_many_tokens(program):
    _, _, cached, variables = made(program, "block", True)
    with pytest.raises(ValueError, match=r"expected at most 24 tokens, the context; got 5 \+ 20"):
        program.generate(cached, variables, PROMPT, 20)


def test_fewer_tokens_than_one(program, capsys):
    with pytest.raises(SystemExit) as exit:
        program.main(["runs/gpt-1", "--tokens", "-3"])
    assert exit.value.code == 2 and "--tokens: expected at least 1; got -3" in capsys.readouterr().err


def test_the_program(program, tmp_path, capsys):
    argv = [*runs.TINY, "--data", runs.short_text(tmp_path), "--recipe", "O3", "--steps", "2", "--no-twin"]
    assert program.train_gpt.main([*argv, "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    folder = tmp_path / "served"
    assert program.main([str(tmp_path / "run"), "--tokens", "12", "--export", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert printed.startswith("def ") and printed.endswith("\nfp8: the export says the same tokens\n")
    with pytest.raises(SystemExit) as exit:
        program.main([str(tmp_path / "run"), "--tokens", "13"])
    assert exit.value.code == 2 and "expected at most 16 tokens" in capsys.readouterr().err
