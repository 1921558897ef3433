"""The example that is FP8 training from scratch, beside the package."""

import ast
import functools

import jax
import pytest

import fp8jax


@pytest.fixture(scope="module")
def one_file(load_program):
    return load_program("examples/fp8_in_one_file.py")


def test_losses_are_those_of_current_scaling(one_file):
    """To the bit, until XLA fuses a sum of the two programs in another order."""
    plain = functools.partial(one_file.gpt, jax.numpy.matmul)
    model = fp8jax.transform(plain, "current")
    report = str(model.report(one_file.init(jax.random.key(0)), one_file.batch_of(1)[:, :-1]))
    assert report.startswith("te,scaling=current: 4 of 6 layers in FP8")
    ours = one_file.train(lambda params, tokens: model.apply({"params": params}, tokens), 5)
    by_hand = one_file.train(functools.partial(one_file.gpt, one_file.fp8_dot), 5)
    assert ours == by_hand != one_file.train(plain, 5)


def test_zeros_have_codes(one_file):
    zeros = one_file.quantize(jax.numpy.zeros((4, 4)), one_file.E4M3)
    assert float(zeros.scale) == 1 and not zeros.codes.astype("float32").any()


def test_it_learns(one_file):
    losses = one_file.train(functools.partial(one_file.gpt, one_file.fp8_dot), 200)
    assert losses[0] > 4 and losses[-1] < 0.5


def test_the_dots_operands_are_fp8(one_file):
    """Each of three for each kernel, in the loss and its gradient."""
    params, tokens = one_file.init(jax.random.key(0)), one_file.batch_of(1)[:, :-1]

    def loss(params):
        return one_file.gpt(one_file.fp8_dot, params, tokens).mean()

    text = str(jax.make_jaxpr(jax.grad(loss))(params))
    assert text.count("new_dtype=float8_e4m3fn") == 8 and text.count("new_dtype=float8_e5m2") == 4


def test_it_imports_only_jax(root):
    """In at most 150 lines."""
    text = (root / "examples/fp8_in_one_file.py").read_text()
    found = set()
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {*names, *([node.module] if isinstance(node, ast.ImportFrom) else [])}
    assert found == {"functools", "typing", "jax", "jax.numpy"} and len(text.splitlines()) <= 150
