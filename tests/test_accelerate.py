"""Accelerate's objects, files and environment variables as recipes, and its nine defects, mended.

The classes here have the names, fields and values of accelerate 1.15.0's after its `__post_init__`, which
asks for TransformerEngine or MS-AMP to be installed. "Launched" is the environment that its
`accelerate launch --mixed_precision fp8` makes.
"""

import dataclasses
import itertools
import pathlib
import sys
import textwrap
import types
from collections import UserDict

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import fp8jax
from fp8jax import Recipe
from fp8jax.recipe.from_accelerate import SETTINGS


@dataclasses.dataclass
class TERecipeKwargs:
    use_autocast_during_eval: bool | None = False
    margin: int | None = 0
    interval: int | None = 1
    fp8_format: str | None = "HYBRID"
    amax_history_len: int | None = 1024
    amax_compute_algo: str | None = "most_recent"
    override_linear_precision: tuple | None = (False, False, False)
    use_mxfp8_block_scaling: bool | None = False


@dataclasses.dataclass
class MSAMPRecipeKwargs:
    opt_level: str | None = "O2"


@dataclasses.dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    opt_level: str | None = None  # so it is left, see defect 2
    backend: str | None = None


@dataclasses.dataclass
class AORecipeKwargs:
    config: object = None
    module_filter_func: object = None
    pad_inner_dim: bool | None = True
    enable_fsdp_float8_all_gather: bool | None = True


class Ours(TERecipeKwargs):
    """A user's subclass."""


LAUNCHED = {
    "ACCELERATE_MIXED_PRECISION": "fp8",
    "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL": "False",
    "ACCELERATE_FP8_MARGIN": "0",
    "ACCELERATE_FP8_INTERVAL": "1",
    "ACCELERATE_FP8_FORMAT": "HYBRID",
    "ACCELERATE_FP8_AMAX_HISTORY_LEN": "1024",
    "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "most_recent",
    "ACCELERATE_FP8_OVERRIDE_FPROP": "False",
    "ACCELERATE_FP8_OVERRIDE_DGRAD": "False",
    "ACCELERATE_FP8_OVERRIDE_WGRAD": "False",
    "ACCELERATE_FP8_OPT_LEVEL": "O2",
    "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "1",
    "ACCELERATE_FP8_PAD_INNER_DIM": "1",
}
# What TransformerEngine's settings are if nobody says anything.
DEFAULT = "te,amax_compute_algo=most_recent"


def variables(**changes):
    """ACCELERATE_FP8_* by the part that differs."""
    return {f"ACCELERATE_FP8_{name}": value for name, value in changes.items()}


def written(folder, text):
    path = folder / "config.yaml"
    path.write_text(textwrap.dedent(text))
    return path


# What each source means ###########################################################################


@pytest.mark.parametrize(
    "source, recipe",
    [
        (TERecipeKwargs(), DEFAULT),
        (TERecipeKwargs(*[None] * 8), DEFAULT),
        (TERecipeKwargs(amax_compute_algo="max"), "te"),
        (
            TERecipeKwargs(True, 2, 3, "E4M3", 16, "max"),
            "te,fp8_format=E4M3,margin=2,interval=3,amax_history_len=16",
        ),
        (Ours(margin=1), "te,margin=1,amax_compute_algo=most_recent"),
        (MSAMPRecipeKwargs(), "O2"),
        (MSAMPRecipeKwargs("O1"), "O1"),
        (MSAMPRecipeKwargs(None), "O2"),
        (FP8RecipeKwargs(), DEFAULT),
        (FP8RecipeKwargs(backend="MSAMP"), "O2"),
        (FP8RecipeKwargs(backend="TE", margin=4), "te,margin=4,amax_compute_algo=most_recent"),
        (FP8RecipeKwargs(opt_level="O1"), "O1"),
        (types.SimpleNamespace(backend="te", amax_compute_algo="max", _private=1), "te"),
        ({}, DEFAULT),
        ({"backend": "MS-AMP"}, "O2"),
        ({"backend": None, "opt_level": "o1"}, "O1"),
        ({"backend": "auto", "margin": "3"}, "te,margin=3,amax_compute_algo=most_recent"),
        ({"fp8_backend": "Te", "fp8_amax_compute_algo": "MAX", "FP8-Margin": 1}, "te,margin=1"),
        ({"backend": "msamp", "fp8_opt_level": "O1", "margin": 0, "fp8_format": "hybrid"}, "O1"),
        (UserDict(amax_compute_algo="max", fp8_format="e4m3"), "te,fp8_format=E4M3"),
        ({"mixed_precision": "fp8"}, DEFAULT),
        ({"mixed_precision": "fp8", "fp8_config": {"opt_level": "O1"}}, "O1"),
        ({"mixed_precision": "BF16", "fp8_config": {}}, "bf16"),
        ({"mixed_precision": "fp16", "num_processes": 8, "fsdp_config": {"fsdp_version": 2}}, "fp16_amp"),
        ({"mixed_precision": "no"}, "fp32"),
        ({"fp8_config": {"backend": "msamp"}, "mixed_precision": None}, "O2"),
    ],
    ids=str,
)
def test_objects_and_mappings(source, recipe):
    got = Recipe.from_accelerate(source)
    assert str(got) == recipe and Recipe.parse(recipe) == got
    if dataclasses.is_dataclass(source) and "backend" in (given := dataclasses.asdict(source)):
        assert Recipe.from_accelerate(given) == got


@pytest.mark.parametrize(
    "text, recipe",
    [
        ("mixed_precision: bf16", "bf16"),
        ("mixed_precision: 'no'", "fp32"),
        ("mixed_precision: no", "fp32"),  # False to YAML
        ("Mixed_Precision: FP8\nFP8_Config: {Backend: TE, Amax_Compute_Algo: max}", "te"),
        ("fp8_config:\n  opt_level: O1\n  backend: no", "O1"),
        ("mixed_precision: fp8\nfp8_config:", DEFAULT),
        ('{"mixed_precision": "fp8", "fp8_config": {"backend": "MSAMP"}}', "O2"),
        # accelerate's examples/config_yaml_templates/fp8.yaml and tests/test_configs/0_34_0_fp8.yaml.
        (
            """
            distributed_type: "NO"
            mixed_precision: "fp8"
            fp8_config:
              backend: TE # Can be TE | MS-AMP
              amax_history_len: 1024
              fp8_format: E4M3
              interval: 1
              margin: 0
              override_linear_precision: [false, false, false]
              use_autocast_during_eval: false
              #opt_level: O1
            """,
            "te,fp8_format=E4M3,amax_compute_algo=most_recent",
        ),
        (
            """
            compute_environment: LOCAL_MACHINE
            distributed_type: MULTI_GPU
            downcast_bf16: 'no'
            fp8_config:
              amax_compute_algo: max
              amax_history_len: 1024
              backend: TE
              fp8_format: E4M3
              interval: 1
              margin: 0
              override_linear_precision: (false, false, false)
              use_autocast_during_eval: false
            mixed_precision: fp8
            rdzv_backend: static
            """,
            "te,fp8_format=E4M3",
        ),
    ],
)
@pytest.mark.parametrize("kind", [str, pathlib.Path])
def test_files(tmp_path, text, recipe, kind):
    assert str(Recipe.from_accelerate(kind(written(tmp_path, text)))) == recipe


@pytest.mark.parametrize(
    "environ, recipe",
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "bf16"),
        ({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "true"}, "fp32"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, DEFAULT),
        (variables(BACKEND="msamp"), "O2"),
        (variables(OPT_LEVEL="O2"), "O2"),
        (variables(MARGIN="2", AMAX_COMPUTE_ALGO="max"), "te,margin=2"),
        (
            variables(OVERRIDE_WGRAD="true", AMAX_COMPUTE_ALGO="max"),
            "te,override_linear_precision=False+False+True",
        ),
        (LAUNCHED, DEFAULT),
        (
            LAUNCHED | variables(BACKEND="te", FORMAT="E4M3"),
            "te,fp8_format=E4M3,amax_compute_algo=most_recent",
        ),
        (LAUNCHED | variables(BACKEND="msamp"), "O2"),
        (LAUNCHED | variables(BACKEND="MSAMP", OPT_LEVEL="O1"), "O1"),
        (LAUNCHED | variables(OPT_LEVEL="O1"), "O1"),
        (
            LAUNCHED | variables(BACKEND="NO", USE_AUTOCAST_DURING_EVAL="True", OVERRIDE_FPROP="1"),
            f"{DEFAULT},override_linear_precision=True+False+False",
        ),
    ],
    ids=str,
)
def test_the_environment(environ, recipe, monkeypatch):
    assert str(Recipe.from_accelerate(environ=environ)) == recipe
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert str(Recipe.from_accelerate()) == recipe


def test_settings_of_transformer_engine():
    """Each setting changes its own field and no other."""
    changes = {
        "fp8_format": "E4M3",
        "margin": 3,
        "interval": 5,
        "amax_history_len": 7,
        "amax_compute_algo": "max",
        "override_linear_precision": (False, True, False),
    }
    of_te = {name for name, spec in SETTINGS.items() if spec.backend == "TE"}
    assert set(changes) == of_te - {"use_autocast_during_eval", "use_mxfp8_block_scaling"}
    default = Recipe.te(amax_compute_algo="most_recent")
    for name, value in changes.items():
        got = Recipe.from_accelerate({name: value})
        assert got == dataclasses.replace(default, **{name: value}) != default


@pytest.mark.parametrize("how", [True, False])
def test_how_to_evaluate_is_not_the_recipes_to_say(how):
    assert str(Recipe.from_accelerate(TERecipeKwargs(use_autocast_during_eval=how))) == DEFAULT


@pytest.mark.parametrize("given", [{}, {"fp8_format": "E4M3"}, {"fp8_format": "HYBRID"}])
def test_mxfp8(given):
    assert Recipe.from_accelerate(TERecipeKwargs(use_mxfp8_block_scaling=True, **given)) == Recipe.MXFP8


# What is refused ##################################################################################


@pytest.mark.parametrize(
    "source, message",
    [
        (
            {"marjin": 1},
            r"unknown marjin \(did you mean margin\?\); expected some of backend, fp8_format, margin",
        ),
        ({"opt_lvl": "O1", "zzz": 1}, r"unknown opt_lvl \(did you mean opt_level\?\), zzz; expected some of"),
        ({"backend": "tee"}, "`backend` is one of: TE MSAMP auto; got 'tee'"),
        ({"backend": 3}, "`backend` is one of: TE MSAMP auto; got 3"),
        ({"opt_level": "O3"}, "`opt_level` is one of: O1 O2; got 'O3'"),
        ({"opt_level": "02"}, "`opt_level` is one of: O1 O2; got '02'"),
        ({"fp8_format": "E4M3FN"}, "`fp8_format` is one of: HYBRID E4M3; got 'E4M3FN'"),
        (
            TERecipeKwargs(fp8_format="E5M2"),
            r"`fp8_format` is one of: HYBRID E4M3 \(E5M2 is too coarse.*; got 'E5M2'",
        ),
        (
            TERecipeKwargs(use_mxfp8_block_scaling=True, amax_history_len=16, margin=1),
            "use_mxfp8_block_scaling takes no margin, amax_history_len; leave that out",
        ),
        ({"amax_compute_algo": "mean"}, "`amax_compute_algo` is one of: max most_recent; got 'mean'"),
        ({"margin": "two"}, "`margin` is one of: an integer; got 'two'"),
        ({"margin": 1.5}, "`margin` is one of: an integer; got 1.5"),
        ({"interval": True}, "`interval` is one of: an integer; got True"),
        (
            {"use_autocast_during_eval": "maybe"},
            "`use_autocast_during_eval` is one of: true false; got 'maybe'",
        ),
        (
            {"override_linear_precision": True},
            "is one of: false, or three booleans: fprop dgrad wgrad; got True",
        ),
        ({"override_linear_precision": "(false, true)"}, "is one of: false, or three booleans: fprop"),
        (
            {"override_linear_precision": ["no", "no", 2]},
            "`override_linear_precision` is one of: true false; got 2",
        ),
        ({"backend": "te", "opt_level": "O2"}, "`opt_level` is for backend MSAMP, and the backend is TE"),
        (
            {"backend": "msamp", "margin": 2},
            "`margin` is for backend TE, and the backend is MSAMP, which has opt_",
        ),
        (FP8RecipeKwargs(opt_level="O1", margin=2), "`margin` is for backend TE, and the backend is MSAMP"),
        (FP8RecipeKwargs(backend="TE", opt_level="O2"), r"the backend is TE, .*Recipe.parse\('te\+O2'\)"),
        ({"pad_inner_dim": False}, "`pad_inner_dim` is for backend AO, and the backend is TE"),
        (AORecipeKwargs(), r"`backend` is one of: TE MSAMP auto \(torchao.*'te,scaling=current'.*; got 'AO'"),
        ({"backend": "ao"}, "torchao's settings have no recipe"),
        (
            {"amax_history_len": 8, "amax_history_length": 16},
            "one value of `amax_history_len`; got amax_history_len=8 and amax_history_length=16",
        ),
        ({"Margin": 1, "fp8_margin": 0}, "one value of `margin`; got Margin=1 and fp8_margin=0"),
        ({"mixed_precision": "fp4"}, "`mixed_precision` is one of: no fp16 bf16 fp8; got 'fp4'"),
        (
            {"mixed_precision": "bf16", "fp8_config": {"margin": 1}},
            "need mixed_precision=fp8; got .*bf16 and margin=1",
        ),
        ({"mixed_precision": None}, "expected `mixed_precision` or settings of FP8; got neither"),
        ({"mixed_precision": "fp8", "MIXED-PRECISION": "no"}, "expected mixed_precision once"),
        ({"mixed_precision": "fp8", "fp8_config": "te"}, "`fp8_config` is a block of `key: value`; got 'te'"),
        ({"mixed_precision": "fp8", "fp8_conf": {}}, r"unknown fp8_conf \(did you mean fp8_config\?\)"),
        (
            {"mixed_precison": "bf16", "fp8_config": {}},
            r"unknown mixed_precison \(did you mean mixed_precision\?\)",
        ),
        ({"mixed_precision": "fp8", "fp8_backend": "te"}, "expected fp8_backend in the block fp8_config"),
        ({"mixed_precision": "fp8", "opt_level": "O1"}, "expected opt_level in the block fp8_config"),
    ],
    ids=str,
)
def test_what_contradicts_or_means_nothing_raises_one_line(source, message):
    with pytest.raises(ValueError, match=message) as error:
        Recipe.from_accelerate(source)
    assert str(error.value).startswith("from_accelerate: ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "environ, message",
    [
        ({}, r"ACCELERATE_MIXED_PRECISION or ACCELERATE_FP8_\* in the environment; got neither"),
        (
            {"ACCELERATE_MIXED_PRECISION": "half"},
            "`ACCELERATE_MIXED_PRECISION` is one of: no fp16 bf16 fp8; got 'half'",
        ),
        (variables(MARGN="1"), r"unknown ACCELERATE_FP8_MARGN \(did you mean ACCELERATE_FP8_MARGIN\?\)"),
        (variables(MARGIN=""), "`ACCELERATE_FP8_MARGIN` is one of: an integer; got ''"),
        (variables(OVERRIDE_DGRAD="2"), "`ACCELERATE_FP8_OVERRIDE_DGRAD` is one of: true false; got '2'"),
        (
            variables(MARGIN="1", OPT_LEVEL="O2"),
            "`ACCELERATE_FP8_MARGIN` is for backend TE, and the backend is MSAMP",
        ),
        (
            LAUNCHED | variables(BACKEND="te", OPT_LEVEL="O1"),
            "`ACCELERATE_FP8_OPT_LEVEL` is for backend MSAMP",
        ),
        (LAUNCHED | variables(BACKEND="ao"), "torchao's settings have no recipe"),
        (LAUNCHED | variables(PAD_INNER_DIM="0"), "`ACCELERATE_FP8_PAD_INNER_DIM` is for backend AO"),
        (LAUNCHED | variables(USE_MXFP8_BLOCK_SCALING="true", MARGIN="1"), "takes no margin"),
        (
            LAUNCHED | {"ACCELERATE_MIXED_PRECISION": "bf16"},
            "settings of FP8 need ACCELERATE_MIXED_PRECISION=fp8",
        ),
        (
            LAUNCHED | variables(AMAX_HISTORY_LEN="8", AMAX_HISTORY_LENGTH="16"),
            "one value of `amax_history_len`; got ACCELERATE_FP8_AMAX_HISTORY_LEN=8",
        ),
    ],
    ids=str,
)
def test_wrong_environment_variables(environ, message):
    """Variables that contradict each other, or have no meaning, raise an error of one line."""
    with pytest.raises(ValueError, match=message) as error:
        Recipe.from_accelerate(environ=environ)
    assert str(error.value).startswith("from_accelerate: ") and "\n" not in str(error.value)


# Nine levels of nine aliases: 3 GB.
BOMB = "a: &a [" + 9 * "1, " + "]\n"
BOMB += "".join(f"{b}: &{b} [{9 * f'*{a}, '}]\n" for a, b in itertools.pairwise("abcdefghi"))
BOMB += "fp8_config: {margin: *i}"


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: [", "config.yaml is no YAML: while parsing"),
        ("", "expected `mixed_precision:` or `fp8_config:` in .*config.yaml; got neither"),
        ("- fp8", "expected `mixed_precision:`"),
        ("num_processes: 2", "expected `mixed_precision:`"),
        ("fp8_config: {backend: TE, margn: 1}", r"unknown margn \(did you mean margin\?\)"),
        ("fp8_config: " + 5000 * "[", r"config.yaml is nested deeper than 20 blocks in line 1"),
        (5000 * "- ", r"config.yaml is nested deeper than 20 blocks in line 1"),
        (BOMB, r"config.yaml has more than 10,000 values, if each alias counts as what it stands for"),
        ("fp8_config: &a {margin: *a}", r"config.yaml has an alias \*a within its own block"),
        (100_001 * "#", r"config.yaml has 100,001 bytes; expected a YAML file of at most 100,000"),
    ],
)
def test_files_that_say_nothing_raise(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        Recipe.from_accelerate(written(tmp_path, text))


def test_a_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\x93NUMPY\x01\x00v\x00")
    with pytest.raises(ValueError, match="config.yaml is no YAML: it is not UTF-8 text"):
        Recipe.from_accelerate(path)


@pytest.mark.parametrize(
    "text, key, line",
    [
        ("mixed_precision: fp8\nmixed_precision: bf16", "mixed_precision", 2),
        ("mixed_precision: fp8\nfp8_config:\n  margin: 1\n  'margin': 2", "margin", 4),
        ("mixed_precision: fp8\nfsdp_config: {a: [{b: 1, b: 1}]}", "b", 2),
    ],
)
def test_a_key_that_stands_twice_in_a_file_is_refused(tmp_path, text, key, line):
    message = f"config.yaml says `{key}` twice, again in line {line}; leave one of them out"
    with pytest.raises(ValueError, match=message):
        Recipe.from_accelerate(written(tmp_path, text))


def test_a_block_that_is_merged_may_be_overridden(tmp_path):
    text = "base: &base {margin: 1, interval: 2}\nfp8_config: {<<: *base, margin: 3}"
    recipe = Recipe.from_accelerate(written(tmp_path, text))
    assert (recipe.margin, recipe.interval) == (3, 2)


def test_a_value_that_no_recipe_has_is_refused_by_the_recipe():
    with pytest.raises(ValueError, match="`margin` is one of: an integer from 0 to 100; got '-1'"):
        Recipe.from_accelerate({"margin": -1})
    with pytest.raises(ValueError, match="takes all three GEMMs out of FP8; say gemm=BF16"):
        Recipe.from_accelerate({"override_linear_precision": [True, True, True]})


def test_what_is_no_source_raises(tmp_path):
    for source in (TERecipeKwargs, 8, [TERecipeKwargs()]):
        with pytest.raises(TypeError, match="expected `source` to be an object like TERecipeKwargs"):
            Recipe.from_accelerate(source)
    with pytest.raises(ValueError, match="`environ` is read where no `source` is given; got both"):
        Recipe.from_accelerate({}, environ={})
    with pytest.raises(FileNotFoundError):
        Recipe.from_accelerate(tmp_path / "none.yaml")


def test_without_pyyaml_only_files_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert Recipe.from_accelerate({"backend": "msamp"}) == Recipe.O2
    with pytest.raises(ImportError, match=r"run `pip install .\.\[train\]"):
        Recipe.from_accelerate(written(tmp_path, "mixed_precision: bf16"))


# Accelerate's defects #############################################################################


def test_defect_1_the_documented_optimization_level():
    assert Recipe.from_accelerate({"backend": "msamp", "optimization_level": "O2"}) == Recipe.O2
    assert Recipe.from_accelerate({"backend": "msamp", "optimization_level": "O1"}) == Recipe.O1


def test_defect_2_msamp_backend():
    """MS-AMP need not be installed, and its level is checked."""
    kwargs = FP8RecipeKwargs(backend="msamp")  # where TransformerEngine is, its opt_level stays None
    assert kwargs.opt_level is None and Recipe.from_accelerate(kwargs) == Recipe.O2
    with pytest.raises(ValueError, match="`opt_level` is one of: O1 O2; got 'fastest'"):
        Recipe.from_accelerate(FP8RecipeKwargs(backend="msamp", opt_level="fastest"))


@pytest.mark.parametrize("backend", ["te", "TE", "Te"])
def test_defect_3_a_backend_in_lower_case(backend):
    assert str(Recipe.from_accelerate(environ=LAUNCHED | variables(BACKEND=backend))) == DEFAULT


def test_defect_4_the_questionnaires_own_keys(tmp_path):
    """Read from its file, and from the variables that a launch makes of that: both spellings, one ignored."""
    text = "mixed_precision: fp8\nfp8_config: {backend: MSAMP, optimization_level: O1}"
    assert Recipe.from_accelerate(written(tmp_path, text)) == Recipe.O1
    launched = LAUNCHED | variables(BACKEND="MSAMP", OPTIMIZATION_LEVEL="O1")
    assert Recipe.from_accelerate(environ=launched) == Recipe.O1
    assert Recipe.from_accelerate(environ=dict(reversed(launched.items()))) == Recipe.O1

    text = "fp8_config: {backend: TE, amax_history_length: 16, amax_compute_algorithm: max}"
    assert Recipe.from_accelerate(written(tmp_path, text)) == Recipe.te(amax_history_len=16)
    launched = LAUNCHED | variables(BACKEND="TE", AMAX_HISTORY_LENGTH="16", AMAX_COMPUTE_ALGORITHM="max")
    assert Recipe.from_accelerate(environ=launched) == Recipe.te(amax_history_len=16)


def test_defect_5_the_documented_override_is_read(tmp_path):
    for override in ("(false, false, true)", "[false, false, true]", "'False,False,True'", "[0, no, yes]"):
        text = f"mixed_precision: fp8\nfp8_config: {{override_linear_precision: {override!s}}}"
        if override.startswith("("):
            text = f"mixed_precision: fp8\nfp8_config:\n  override_linear_precision: {override}"
        recipe = Recipe.from_accelerate(written(tmp_path, text))
        assert recipe.override_linear_precision == (False, False, True)
    # What its launch makes of the text is lost; the error says what to write.
    letters = variables(OVERRIDE_FPROP="(", OVERRIDE_DGRAD="f", OVERRIDE_WGRAD="a")
    with pytest.raises(ValueError, match=r"write `override_linear_precision: \[false, false, true\]`"):
        Recipe.from_accelerate(environ=LAUNCHED | letters)


def test_override_linear_precision_false(tmp_path):
    """So it wrote the answer "no" before it wrote three of them."""
    for word in ("false", "'False'", "no"):
        text = f"mixed_precision: fp8\nfp8_config: {{margin: 1, override_linear_precision: {word}}}"
        assert Recipe.from_accelerate(written(tmp_path, text)).override_linear_precision == (False,) * 3


def test_defect_6_an_explicit_most_recent_is_kept():
    for source in (TERecipeKwargs(amax_compute_algo="most_recent"), {"amax_compute_algo": "most_recent"}):
        assert Recipe.from_accelerate(source).amax_compute_algo == "most_recent"
    launched = LAUNCHED | variables(BACKEND="TE", AMAX_COMPUTE_ALGO="most_recent")
    assert Recipe.from_accelerate(environ=launched).amax_compute_algo == "most_recent"


class Odd(nn.Module):
    """A width that 16 does not divide, and layers after it."""

    @nn.compact
    def __call__(self, x):
        for name, width in (("first", 32), ("odd", 33), ("next", 64), ("last", 32)):
            x = nn.LayerNorm(use_bias=False, use_scale=False)(nn.Dense(width, name=name)(x))
        return x


def in_fp8(module, source, **changes):
    recipe = dataclasses.replace(Recipe.from_accelerate(source), **changes)
    rows = fp8jax.transform(module, recipe).report(jnp.ones((4, 32))).rows
    return [row.path for row in rows if row.fp8]


@pytest.mark.parametrize("source", [TERecipeKwargs(), MSAMPRecipeKwargs()], ids=["te", "msamp"])
def test_defect_7_converted_layers(source):
    """An odd one, its siblings after it, and a model that is nothing but a layer."""
    assert in_fp8(Odd(), source) == ["first", "odd", "next", "last"]
    assert len(in_fp8(nn.Dense(32), source)) == 1
    model = fp8jax.transform(Odd(), Recipe.from_accelerate(source))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((4, 32)))
    assert set(shapes["params"]) == {"first", "odd", "next", "last"}


def test_defect_8_deepspeed_does_not_undo_the_settings(tmp_path):
    text = """
        distributed_type: DEEPSPEED
        deepspeed_config: {zero_stage: 2}
        mixed_precision: fp8
        fp8_config: {backend: TE, margin: 2, amax_compute_algo: max}
    """
    assert Recipe.from_accelerate(written(tmp_path, text)) == Recipe.te(margin=2)
    assert Recipe.from_accelerate(environ=LAUNCHED | variables(MARGIN="2")).margin == 2


def test_defect_9_the_first_and_last_layer_are_left_out_by_name():
    assert in_fp8(Odd(), TERecipeKwargs(), exclude=("first", "last")) == ["odd", "next"]
