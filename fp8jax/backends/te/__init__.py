"""FP8 GEMMs through NVIDIA TransformerEngine's cuBLASLt, and ways between its modules and ours.

    y = fp8jax.dot_general(x, w, numbers, recipe="te", state=state, backend="te")
    model = fp8jax.transform(model, "O2", backend="te")

What TransformerEngine does here is the three GEMMs of a product, on FP8 operands and scales that
are made as for every other backend. So all recipes work, scaling state is the same and is updated
the same way (amaxes of a layer that is used twice merge by max, a NaN is forgotten), and a
checkpoint goes from one backend to another as it is. Compiled for an H200, an MLP's program is that
of "xla" with other calls in the place of its GEMMs. TransformerEngine's casts are not used: for
scales per tensor they write rows and leave the transposes to XLA, as ours do, and XLA computes a
norm or an activation within a cast of its own only. Its LayerNorm with FP8 output is not used
either: in a Flax model a norm is a module of its own, whose output may go anywhere.

For users of TransformerEngine's own modules:

    recipe_of("te,margin=1")                  # its recipe object, for any of its interfaces
    with autocast("te"): ...                  # its modules in FP8
    nn.Dense(64, dot_general_cls=dot_general_cls("te"))
    to_te(state), from_te(state, "te")        # scaling state of its modules and of ours

Its modules add the state of a layer that is used twice, which makes the scale twice too large;
`fp8jax.transform(module, "te", backend="te")` gives each use a state of its own.

Limits. TransformerEngine is told of many devices by its own `MeshResource`: "auto" takes this
backend where there is one device. A product under `vmap` is one GEMM after the other.

The files: `gemm` (the products), `modules` (what its own modules need), `state` (theirs and ours).

References:
    TransformerEngine 2.20.2, transformer_engine/jax: cpp_extensions/gemm.py, quantize/quantizer.py,
    flax/module.py.
"""

from fp8jax.backends.te.gemm import NORMS as NORMS
from fp8jax.backends.te.gemm import dot as dot
from fp8jax.backends.te.gemm import supports as supports
from fp8jax.backends.te.modules import autocast as autocast
from fp8jax.backends.te.modules import dot_general_cls as dot_general_cls
from fp8jax.backends.te.modules import recipe_of as recipe_of
from fp8jax.backends.te.state import from_te as from_te
from fp8jax.backends.te.state import to_te as to_te
