"""The precision chart as a value: its rows, its text, and what it refuses."""

import dataclasses
import inspect
import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import fp8jax
from fp8jax import Recipe, formats
from fp8jax.recipe import COMBINED, DEFAULT_EXCLUDE, PRESETS

# The chart: gemm, comm, weight, master weight, weight gradient, moments; and TransformerEngine's window of
# amaxes (1024) or MS-AMP's (16), and the optimizer's rounding.
NEAREST = ("nearest", "nearest", "value")
CHART = {
    "fp32": ("FP32", "FP32", "FP32", "-", "FP32", ("FP32", "FP32"), 1024, NEAREST),
    "bf16": ("BF16", "FP32", "FP32", "-", "FP32", ("FP32", "FP32"), 1024, NEAREST),
    "fp16_amp": ("FP16", "FP32", "FP32", "-", "FP32", ("FP32", "FP32"), 1024, NEAREST),
    "te": ("FP8", "FP32", "FP32", "-", "FP32", ("FP32", "FP32"), 1024, NEAREST),
    "O1": ("FP8", "FP8", "FP16", "-", "E4M3", ("FP32", "FP32"), 16, NEAREST),
    "O2": ("FP8", "FP8", "FP16", "-", "E4M3", ("E4M3", "FP16"), 16, NEAREST),
    "O3": ("FP8", "FP8", "E4M3", "FP16", "E4M3", ("E4M3", "FP16"), 16, NEAREST),
    "te+O2": ("FP8", "FP8", "FP16", "-", "E4M3", ("E4M3", "FP16"), 1024, NEAREST),
    "fp8": ("FP8", "FP8", "FP16", "-", "E4M3", ("E5M2", "FP16"), 16, ("stochastic", "kahan", "root")),
    "block": ("FP8", "FP32", "FP32", "-", "FP32", ("FP32", "FP32"), 1024, NEAREST),
    "mxfp8": ("FP8", "FP32", "FP32", "-", "FP32", ("FP32", "FP32"), 1024, NEAREST),
    "nvfp4": ("FP4", "FP32", "FP32", "-", "FP32", ("FP32", "FP32"), 1024, NEAREST),
}
BLOCKS = ("block", "mxfp8", "nvfp4")
COLUMNS = (
    "gemm",
    "comm",
    "weight",
    "master_weight",
    "weight_grad",
    "moments",
    "amax_history_len",
    "rounding",
)
# What every preset has in common: TransformerEngine's defaults and our start.
COMMON = {
    "scaling": "delayed",
    "fp8_format": "HYBRID",
    "fp4_options": ("hadamard", "stochastic", "2d"),
    "margin": 0,
    "interval": 1,
    "amax_compute_algo": "max",
    "override_linear_precision": (False, False, False),
    "first_scale": "typical",
    "include": ("*",),
    "exclude": DEFAULT_EXCLUDE,
}
FP4_OPTIONS = tuple(
    chosen
    for n in range(5)
    for chosen in itertools.combinations(("hadamard", "stochastic", "2d", "46", "eden"), n)
    if "eden" not in chosen or chosen in (("eden",), ("46", "eden"))
)
CHOICES = {
    "gemm": ("FP32", "BF16", "FP16", "FP8", "FP4"),
    "comm": ("FP32", "BF16", "FP8"),
    "weight": ("FP32", "FP16", "E4M3"),
    "master_weight": ("-", "FP32", "FP16"),
    "weight_grad": ("FP32", "E4M3"),
    "moments": (("FP32", "FP32"), ("E4M3", "FP16"), ("E5M2", "FP16")),
    "rounding": tuple(
        itertools.product(("nearest", "stochastic"), ("nearest", "stochastic", "kahan"), ("value", "root"))
    ),
    "scaling": ("delayed", "current", "block", "block_float32", "mxfp8", "nvfp4"),
    "fp8_format": ("HYBRID", "E4M3"),
    "amax_compute_algo": ("max", "most_recent"),
    "first_scale": ("typical", "tensor", "one"),
    "fp4_options": FP4_OPTIONS,
}
FIELDS = [field.name for field in dataclasses.fields(Recipe)]


@pytest.mark.parametrize("name", CHART)
def test_a_preset_is_its_row_of_the_chart(name):
    recipe = Recipe.parse(name)
    common = COMMON | ({"scaling": name, "fp8_format": "E4M3"} if name in BLOCKS else {})
    assert dataclasses.asdict(recipe) == {**dict(zip(COLUMNS, CHART[name], strict=True)), **common}
    assert str(recipe) == name
    assert recipe == PRESETS[name] == getattr(Recipe, name.replace("+", "_").upper())
    for format in {recipe.weight, *recipe.moments}:
        assert formats.get(format).name == format


def test_the_presets_are_those_and_all_different():
    assert list(PRESETS) == list(CHART)
    presets = [*PRESETS.values(), *COMBINED.values()]
    assert len(set(presets)) == len(presets)
    assert set(FIELDS) == {*COLUMNS, *COMMON}


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "fp8"])
@pytest.mark.parametrize("name", BLOCKS)
def test_combined_presets(name, level):
    """The GEMM column of one, and the other columns of the other."""
    recipe, gemm, others = (Recipe.parse(text) for text in (f"{name}+{level}", name, level))
    of_gemm = {"gemm", "scaling", "fp8_format", "amax_history_len"}
    for field in FIELDS:
        assert getattr(recipe, field) == getattr(gemm if field in of_gemm else others, field)
    assert str(recipe) == f"{name}+{level}"


def test_text_names_no_preset_of_blocks_for_a_recipe_without():
    text = "te,scaling=current,fp8_format=E4M3"
    assert str(Recipe.parse(text)) == "te,scaling=current,fp8_format=E4M3"
    assert str(Recipe.parse("te,scaling=block,fp8_format=E4M3")) == "block"


@pytest.mark.parametrize("fp8_format, expected", [("HYBRID", ("E4M3", "E5M2")), ("E4M3", ("E4M3", "E4M3"))])
def test_formats_of_a_gemm(fp8_format, expected):
    assert Recipe.te(fp8_format).gemm_formats == expected


def test_a_recipe_is_a_frozen_hashable_replaceable_value():
    recipe = Recipe.O2
    changed = dataclasses.replace(recipe, margin=2)
    assert changed.margin == 2 and recipe.margin == 0 and changed != recipe
    assert hash(dataclasses.replace(changed, margin=0)) == hash(recipe)
    assert {recipe: 1}[dataclasses.replace(changed, margin=0)] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.margin = 3
    with pytest.raises(ValueError, match="`margin` is one of: an integer from 0 to 100; got '-1'"):
        dataclasses.replace(recipe, margin=-1)
    assert fp8jax.Recipe is Recipe


# Parse and str ###################################################################################

patterns = st.lists(
    st.text(st.characters(exclude_characters=",+= ", exclude_categories=("Cs",)), min_size=1, max_size=8),
    max_size=3,
).map(tuple)


@st.composite
def legal_values(draw):
    """Values of all fields that go together, so that what is drawn covers all that is legal."""
    values = {name: draw(st.sampled_from(choices)) for name, choices in CHOICES.items()}
    values |= {
        "margin": draw(st.integers(0, 100)),
        "interval": draw(st.integers(1, 2**20)),
        "amax_history_len": draw(st.integers(1, 2**20)),
        "override_linear_precision": draw(st.tuples(*[st.booleans()] * 3)),
        "include": draw(st.just(("*",)) | patterns),
        "exclude": draw(st.just(DEFAULT_EXCLUDE) | patterns),
    }
    values["master_weight"] = draw(st.sampled_from(("FP32", "FP16"))) if values["weight"] == "E4M3" else "-"
    if values["scaling"] == "nvfp4" or values["gemm"] == "FP4":
        values |= {"scaling": "nvfp4", "gemm": "FP4"}
    if values["gemm"] in ("FP8", "FP4") and values["scaling"] not in ("delayed", "current"):
        values |= {"margin": 0, "interval": 1}
        if values["scaling"] in ("block", "block_float32"):
            values["fp8_format"] = "E4M3"
    if values["gemm"] == "FP8":
        values["fp4_options"] = COMMON["fp4_options"]
    if values["gemm"] not in ("FP8", "FP4"):
        values |= {"weight": "FP32", "master_weight": "-", "weight_grad": "FP32"}
    else:
        values["include"] = values["include"] or ("*",)
        if all(values["override_linear_precision"]):
            values["override_linear_precision"] = (False, True, True)
    of_mu, of_weight, of_nu = values["rounding"]
    if values["moments"] == ("FP32", "FP32"):
        of_mu, of_nu = "nearest", "value"
    if "FP16" not in (values["weight"], values["master_weight"]):
        of_weight = "nearest"
    return values | {"rounding": (of_mu, of_weight, of_nu)}


@hypothesis.given(legal_values())
@hypothesis.settings(max_examples=300)
def test_parse_is_the_inverse_of_str(values):
    try:
        recipe = Recipe(**values)
    except ValueError as error:
        # Only patterns that could not be written down may be refused.
        assert "clude` is one of: a tuple of patterns" in str(error)
        hypothesis.reject()
    text = str(recipe)
    assert (Recipe.parse(text) == recipe) is True, repr(text)
    assert str(Recipe.parse(text)) == text
    assert hash(Recipe.parse(text)) == hash(recipe)


@pytest.mark.parametrize(
    "text, changes",
    [
        ("te,margin=2,interval=3", {"margin": 2, "interval": 3}),
        (" te , scaling = current ", {"scaling": "current"}),
        ("te,exclude=", {"exclude": ()}),
        ("te,exclude=lm_head+*/out", {"exclude": ("lm_head", "*/out")}),
        ("te,moments=E4M3+FP16", {"moments": ("E4M3", "FP16")}),
        (
            "te,override_linear_precision=False+false+True",
            {"override_linear_precision": (False, False, True)},
        ),
        ("te,weight=E4M3,master_weight=FP16", {"weight": "E4M3", "master_weight": "FP16"}),
    ],
)
def test_what_text_means(text, changes):
    assert Recipe.parse(text) == dataclasses.replace(Recipe.TE, **changes)


def test_short_names():
    assert Recipe.parse("current") == Recipe.parse("te,scaling=current")
    assert Recipe.parse("fp8_6") == Recipe.parse("fp8,moments=E5M2+E4M4")
    assert str(Recipe.parse("fp8_6,margin=1")) == "fp8,moments=E5M2+E4M4,margin=1"
    assert str(Recipe.parse("current,margin=1")) == "te,scaling=current,margin=1"


def test_parse_takes_a_recipe_as_it_is_and_str_is_short():
    recipe = dataclasses.replace(Recipe.O2, scaling="current")
    assert Recipe.parse(recipe) is recipe
    assert str(recipe) == "O2,scaling=current"
    assert str(dataclasses.replace(Recipe.O2, amax_history_len=1024)) == "te+O2"


# What is refused #################################################################################

NUMBERS = {
    "margin": ("an integer from 0 to 100", (-1, 101, 1.0, "1", True, None)),
    "interval": ("an integer from 1 to 1048576", (0, -1, 2**20 + 1, 1.5, False)),
    "amax_history_len": ("an integer from 1 to 1048576", (0, -4, 2**20 + 1, "16")),
    "override_linear_precision": (
        "three booleans, as False+False+True",
        ((True, False), (1, 0, 0), [True, False, False], None, "True+False+False"),
    ),
    "include": ("a tuple of patterns", (["*"], "*", ("a,b",), ("a b",), ("",), (1,), ("a+b",))),
    "exclude": ("a tuple of patterns", (["*"], "*", ("a=b",), None)),
}
ILLEGAL = [
    (name, " ".join("+".join(c) if isinstance(c, tuple) else c for c in choices), bad)
    for name, choices in CHOICES.items()
    for bad in ("nonsense", "", None, 8, *(["fp8", "E4M3FN", "E5M2"] if name == "gemm" else []))
] + [(name, legal, bad) for name, (legal, values) in NUMBERS.items() for bad in values]


@pytest.mark.parametrize("name, legal, bad", ILLEGAL, ids=str)
def test_illegal_values(name, legal, bad):
    """The error names the field, and lists the legal values."""
    with pytest.raises(ValueError) as error:
        Recipe(**{name: bad})
    message = str(error.value)
    assert message.startswith(f"recipe: `{name}` is one of: {legal}") and "got" in message
    assert "\n" not in message


def test_an_integer_of_numpy_is_shown_as_such():
    """Its text alone would look legal."""
    with pytest.raises(ValueError, match=r"an integer from 0 to 100; got 'np\.int64\(1\)'"):
        Recipe(margin=np.int64(1))


def test_every_field_has_illegal_values_in_the_table():
    assert {name for name, _, _ in ILLEGAL} == set(FIELDS)


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "O4",
            r"expected one of fp32, bf16, fp16_amp, te, O1, O2, O3, te\+O2, .*, fp8_6, or .*; got 'O4'",
        ),
        ("", r"expected one of fp32, .*; got ''"),
        ("o2", r"expected one of fp32, .*; got 'o2'"),
        ("margin=1", r"expected one of fp32, .*; got 'margin=1'"),
        ("te,marjin=1", r"with a field of gemm, comm, .*, exclude; got 'marjin=1'"),
        ("te,margin", r"expected field=value after the preset, .*; got 'margin'"),
        ("te,", r"expected field=value after the preset, .*; got ''"),
        ("te,margin=-1", r"`margin` is one of: an integer from 0 to 100; got '-1'"),
        ("te,margin=two", r"`margin` is one of: an integer from 0 to 100; got 'two'"),
        ("te,margin=", r"`margin` is one of: an integer from 0 to 100; got ''"),
        (
            "te,scaling=rows",
            r"`scaling` is one of: delayed current block block_float32 mxfp8 nvfp4; got 'rows'",
        ),
        (
            "te,scaling=nvfp4",
            "scaling=nvfp4 needs gemm=FP4: it is the scaling of FP4, and its only one; got gemm=FP8",
        ),
        (
            "block,margin=1",
            "scaling=block needs margin=0: each scale is computed from its block; got margin=1",
        ),
        (
            "O2,scaling=block",
            "scaling=block needs fp8_format=E4M3: no GPU kernel here multiplies E5M2 and E4M3 blocks; got "
            "fp8_format=HYBRID",
        ),
        (
            "te,fp4_options=2d",
            r"needs fp4_options=hadamard\+stochastic\+2d: leave out the options of FP4; got fp4_options=2d",
        ),
        ("nvfp4,fp4_options=2d+2d", "`fp4_options` is one of: "),
        (
            "nvfp4,fp4_options=hadamard+46+eden",
            r"fp4_options=eden goes without hadamard: .* rotation of its own, .*; got fp4_options=had",
        ),
        (
            "nvfp4,fp4_options=stochastic+eden",
            "fp4_options=eden goes without stochastic: it rounds gradients",
        ),
        ("nvfp4,fp4_options=2d+eden", "fp4_options=eden goes without 2d: it rotates the weights"),
        ("te,fp4_options=46", r"needs fp4_options=hadamard\+stochastic\+2d: leave out the options of FP4"),
        ("te,moments=E4M3", r"`moments` is one of: FP32\+FP32 E4M3\+FP16 E5M2\+FP16 .*; got 'E4M3'"),
        ("te,override_linear_precision=yes+no+no", r"`override_linear_precision` is one of: three boo"),
        ("te,include=a++b", r"`include` is one of: a tuple of patterns"),
        ("te,margin=1,margin=2", r"expected each field once; got margin twice"),
    ],
)
def test_text_that_means_nothing_raises_and_says_what_would(text, message):
    with pytest.raises(ValueError, match=message) as error:
        Recipe.parse(text)
    assert str(error.value).startswith("recipe: ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"weight": "E4M3"}, "weight=E4M3 needs master_weight=FP16 or FP32"),
        (
            {"weight": "FP16", "master_weight": "FP32"},
            "any other weight needs master_weight=-; got weight=FP16",
        ),
        ({"master_weight": "FP16"}, "got weight=FP32, master_weight=FP16"),
        ({"gemm": "BF16", "weight": "FP16"}, "with gemm=BF16 both must be FP32; got weight=FP16"),
        ({"gemm": "FP32", "weight_grad": "E4M3"}, "got weight=FP32, weight_grad=E4M3"),
        ({"override_linear_precision": (True, True, True)}, "say gemm=BF16"),
        ({"include": ("re:(",)}, r"`include`: 're:\(' is no regular expression"),
        ({"rounding": ("stochastic", "nearest", "value")}, "needs rounding=nearest.nearest.value; got"),
        ({"rounding": ("nearest", "nearest", "root")}, "FP32 moments are not rounded"),
        ({"rounding": ("nearest", "kahan", "value")}, "got weight=FP32, master_weight=-. Say rounding=nea"),
        ({"include": ()}, "include is empty, so no layer is in FP8; say gemm=BF16"),
    ],
)
def test_columns_that_contradict_each_other_raise_and_say_which(values, message):
    with pytest.raises(ValueError, match=message) as error:
        Recipe(**values)
    assert str(error.value).startswith("recipe: ") and "\n" not in str(error.value)


# TransformerEngine's arguments ###################################################################

TE_ARGUMENTS = {
    "fp8_format": "E4M3",
    "margin": 3,
    "interval": 5,
    "amax_history_len": 7,
    "amax_compute_algo": "most_recent",
    "override_linear_precision": (False, False, True),
    "first_scale": "one",
}


@pytest.mark.parametrize("name", TE_ARGUMENTS)
def test_each_of_tes_arguments_reaches_its_field_alone(name):
    got = Recipe.te(**{name: TE_ARGUMENTS[name]})
    assert got == dataclasses.replace(Recipe.TE, **{name: TE_ARGUMENTS[name]}) != Recipe.TE


def test_tes_arguments_have_its_names_order_and_defaults():
    """Its order but for the format, which comes first here."""
    signature = inspect.signature(Recipe.te)
    assert list(signature.parameters) == list(TE_ARGUMENTS)
    assert {name: p.default for name, p in signature.parameters.items()} == {
        name: getattr(Recipe.TE, name) for name in TE_ARGUMENTS
    }
    assert Recipe.te(*TE_ARGUMENTS.values()) == Recipe.te(**TE_ARGUMENTS)
    with pytest.raises(ValueError, match="`margin`"):
        Recipe.te(margin=-1)
