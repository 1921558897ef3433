"""Gradient checkpointing (remat) of a model's blocks: which blocks, and which residuals they save.

    transform(model, recipe, gradient_checkpointing="fp8")
    transform(model, recipe, gradient_checkpointing="full", checkpoint_blocks=["EncoderLayer", "decoder/*"])

| setting | saved per block, besides its inputs |
|---|---|
| `full` | nothing |
| `fp8` | the FP8 operands of its dots, see `fp8jax.dot.save_fp8_operands` |
| `dots` | the outputs of its layers' dots |
| `dots_fp8` | the same in FP8; all else is computed from the rounded outputs, see `fp8jax.dot.through_fp8` |
| `dots_fp8_inputs` | the same, and the block's input (the residual stream) in FP8, too |

Without `checkpoint_blocks` the blocks are the outermost repeated modules in the tree of the model's calls:
siblings of one class with layers, or the module of a scan's body; otherwise a module that is called more than
once. The blocks of a function without modules are the bodies of its scans.
"""

from fp8jax.rewrite.remat.calls import Calls as Calls
from fp8jax.rewrite.remat.calls import NoBlocksError as NoBlocksError
from fp8jax.rewrite.remat.passes import POLICIES as POLICIES
from fp8jax.rewrite.remat.passes import Checkpointing as Checkpointing
from fp8jax.rewrite.remat.passes import checkpointing as checkpointing
from fp8jax.rewrite.remat.passes import with_checkpoints as with_checkpoints
