"""The TransformerEngine backend: FP8 GEMMs by its cuBLASLt calls, and conversion of its modules' state.

    y = fp8jax.dot.dot_general(x, w, numbers, recipe="te", state=state, backend="te")
    model = fp8jax.transform(model, "O2", backend="te")

TransformerEngine computes only the three GEMMs of a dot. Casts, scales and scaling state are the same as with
every other backend. So all recipes with a scale for each tensor work, amaxes of a layer that is used twice
are merged by max, NaN amaxes are ignored, and checkpoints are independent of the backend. For an H200 an MLP
compiles to the same program as with "xla", except for the GEMM calls.

TransformerEngine's casts are not used: with per-tensor scales they write row-major codes and leave transposes
to XLA, as fp8jax does, and XLA fuses norms and activations only into its own casts. TransformerEngine's
LayerNorm with FP8 output is not used, because in a Flax model a norm is a module, and its output may have
other uses.

For users of TransformerEngine's own modules:

    recipe_of("te,margin=1")                  # TransformerEngine's recipe object
    with autocast("te"): ...                  # TransformerEngine's modules in FP8
    nn.Dense(64, dot_general_cls=dot_general_cls("te"))
    to_te(state), from_te(state, "te")        # conversion of scaling state

TransformerEngine's modules sum the state of a layer that is used twice, so its scale is twice too large.
`fp8jax.transform(module, "te", backend="te")` gives each use a separate state.

Limits: "auto" selects this backend for one device only, because TransformerEngine needs its `MeshResource`
for several devices. Under `vmap` the GEMMs of a dot run one after another.

The files: `gemm` (GEMMs), `modules` (TransformerEngine's modules: their recipes and their scaling state).

References:
    TransformerEngine 2.20.2, transformer_engine/jax: cpp_extensions/gemm.py, quantize/quantizer.py,
    flax/module.py.
"""

from fp8jax.backends.te.gemm import BACKEND as BACKEND
from fp8jax.backends.te.gemm import dot as dot
from fp8jax.backends.te.gemm import supports as supports
from fp8jax.backends.te.modules import autocast as autocast
from fp8jax.backends.te.modules import dot_general_cls as dot_general_cls
from fp8jax.backends.te.modules import from_te as from_te
from fp8jax.backends.te.modules import recipe_of as recipe_of
from fp8jax.backends.te.modules import to_te as to_te
