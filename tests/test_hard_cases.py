"""The example of hard cases: each trains, the same for each recipe but for its formats."""

import dataclasses
import itertools
import json
import math
import sys
from typing import Any

import numpy as np
import pytest
from scipy import stats

NAMES = ("outliers", "cosine tail", "Zipf", "experts", "fine-tuning", "LoRA", "spike", "long")


@pytest.fixture(scope="module")
def cases(load_program):
    return load_program("examples/hard_cases.py")


def test_the_cases_are_those_of_the_docstring(cases):
    assert tuple(cases.CASES) == NAMES
    assert all(f'- "{name}": ' in cases.__doc__ for name in NAMES)


# "cosine tail" and "long" are "spike" but for their schedules, batches and steps.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "spike" else pytest.mark.long)
        for name in NAMES
        if name not in ("cosine tail", "long")
    ],
)
def test_a_case_trains(cases, name):
    case = dataclasses.replace(cases.CASES[name], steps=3, warm=min(cases.CASES[name].warm, 2))
    base, other = (cases.train(case, recipe, 0)[0] for recipe in ("bf16", "fp8"))
    assert 0 < base.loss < 100 and base.skipped == other.skipped == 0
    assert other.loss != base.loss
    for end in (base, other):
        assert end.of_plain == pytest.approx(end.loss, rel=0.2)
    assert other.loss == pytest.approx(base.loss, rel=0.2)
    assert "of the updates of" in cases.said(case, "fp8", 0)


def test_data_is_what_its_name_says(load_program):
    cases = load_program("examples/hard_models.py")
    key = cases.jax.random.key(0)
    channels = np.abs(np.asarray(cases.outliers(key, 0)["x"])).max(axis=0)
    assert (channels > 50).sum() == 1 and len(channels) == 128
    calm, garbage = (cases.spike(key, step) for step in (999, 1000))
    assert np.abs(garbage["x"]).max() == pytest.approx(1000 * np.abs(calm["x"]).max())
    counts = np.bincount(np.concatenate([cases.words(cases.jax.random.key(i), 0)["x"] for i in range(50)]))
    assert counts[0] > 500 and np.median(counts) < 10


def test_ratios_have_the_interval_of_a_paired_t_test(cases):
    base, other = [0.02, 0.03, 0.025, 0.021], [0.022, 0.029, 0.03, 0.024]
    ratio, wanted = cases.ratio_of(other, base), stats.ttest_rel(np.log(other), np.log(base))
    interval: Any = wanted.confidence_interval()
    assert ratio.low == pytest.approx(math.exp(interval.low)) and ratio.low < ratio.mean < ratio.high
    assert ratio.high == pytest.approx(math.exp(interval.high))
    one = cases.ratio_of([0.5], [0.25])
    assert one.mean == pytest.approx(2) and math.isnan(one.low) and math.isnan(one.high)


def test_seeds_are_paired_in_the_picture(cases, tmp_path):
    losses = {"bf16": ((0.02, 0.01), (0.03, 0.02)), "te": ((0.04, 0.01), (0.06, 0.06))}
    runs = [
        {"case": "spike", "recipe": recipe, "seed": seed, "loss": loss, "of plain": plain, "skipped": 0}
        for recipe, found in losses.items()
        for seed, (loss, plain) in enumerate(found)
    ]
    for order in itertools.permutations(runs):
        own, of_plain = cases.ratios_of(list(order), "spike", "te")
        assert own == pytest.approx((2, 2, 2)) and of_plain.mean == pytest.approx(3**0.5)
    cases.draw(runs, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5000


def test_the_command(cases, tmp_path, monkeypatch, capsys):
    """A figure is the ratio of two losses of `train`."""
    arguments = "--tiny --recipes bf16 te te --cases spike".split()
    options = ["--picture", str(tmp_path / "cases.png"), "--record", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["hard_cases.py", *arguments, *options])
    cases.main()
    printed = capsys.readouterr().out
    [record] = tmp_path.glob("*/result.json")
    kept = json.loads(record.read_text())["results"]
    assert [run["recipe"] for run in kept["runs"]] == ["bf16", "te"]
    assert "of the updates of" in kept["statistics"][0]["last step of seed 0"]
    assert (tmp_path / "cases.png").stat().st_size > 5000
    case = dataclasses.replace(cases.CASES["spike"], steps=4)
    base, te = (cases.train(case, recipe, 0)[0] for recipe in ("bf16", "te"))
    assert f"{te.loss / base.loss:.3f} ({te.of_plain / base.of_plain:.3f})" in printed
    assert "\nspike, te: " in printed
