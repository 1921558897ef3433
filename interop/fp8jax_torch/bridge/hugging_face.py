"""The names of Hugging Face's models.

Paths are those of its Flax models: `transformer/h/0/attn/c_attn/kernel` of GPT-2,
`model/layers/0/self_attn/q_proj/kernel` of Llama. Kernels are `nn.Dense`'s, of shape (in, out), in both;
Hugging Face's own Flax GPT-2 kept the transposes of these, and its Flax Llama called a norm's scale
`weight`. Where a model's names differ, move them:

    >>> GPT2.stacked("h").moved("^transformer/", "").place("transformer.h.3.mlp.c_fc.weight")
    Place(path=('h', 'mlp', 'c_fc', 'kernel'), layer=(3,), axes=None, shape=None)
"""

from fp8jax_torch.bridge.names import NameMap, Rename

GPT2 = NameMap(
    (
        # Causal masks in checkpoints of old.
        Rename(r".*\.attn\.(?:masked_)?bias", None),
        Rename(r"((?:.*\.)?(?:wte|wpe))\.weight", r"\1/embedding"),
        Rename(r"((?:.*\.)?ln_\w+)\.weight", r"\1/scale"),
        # Its Conv1D keeps (in, out).
        Rename(r"(.*\.(?:c_attn|c_proj|c_fc|q_attn))\.weight", r"\1/kernel"),
        Rename(r"((?:.*\.)?(?:lm_head|score))\.weight", r"\1/kernel", axes=(1, 0)),
        Rename(r"(.*)\.bias", r"\1/bias"),
    )
)

LLAMA = NameMap(
    (
        # Computed, and in checkpoints of old.
        Rename(r".*\.rotary_emb\.inv_freq", None),
        Rename(r"((?:.*\.)?embed_tokens)\.weight", r"\1/embedding"),
        Rename(r"((?:.*[._])?(?:layer)?norm)\.weight", r"\1/scale"),
        Rename(r"(.*\.\w+_proj)\.weight", r"\1/kernel", axes=(1, 0)),
        Rename(r"((?:.*\.)?(?:lm_head|score))\.weight", r"\1/kernel", axes=(1, 0)),
        Rename(r"(.*)\.bias", r"\1/bias"),
    )
)
