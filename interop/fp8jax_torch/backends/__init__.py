"""Backends for FP8 layers on torch.

| backend   | library           | runs on                          | expresses                         |
|-----------|-------------------|----------------------------------|-----------------------------------|
| `msamp`   | MS-AMP            | H100                             | O1, O2, te+O2                     |
| `te`      | TransformerEngine | compute capability 8.9 or higher | te, and te with current scaling   |
| `torchao` | torchao           | the same or newer; some on a CPU | te with current scaling, mxfp8,   |
|           |                   |                                  | nvfp4, block with float32 scales  |
| `native`  | none but torch    | everywhere; block scaling: a CPU | all levels                        |
"""

from fp8jax_torch.backends.choose import NAMES as NAMES
from fp8jax_torch.backends.choose import choose as choose
