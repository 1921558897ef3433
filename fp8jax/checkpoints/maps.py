"""Name maps of Hugging Face's GPT-2, Llama, Qwen3 and Mixtral.

>>> GPT2.place("transformer.h.0.ln_1.weight").path
('transformer', 'h', '0', 'ln_1', 'scale')
"""

from fp8jax.checkpoints.names import NameMap, Rename
from fp8jax.extras import look_up

# Paths of Hugging Face's Flax models, as in `transformer/h/0/attn/c_attn/kernel` and
# `model/layers/0/self_attn/q_proj/kernel`, with kernels of `nn.Dense`, shape=(in, out). Hugging Face's own
# Flax GPT-2 had transposed kernels, and its Flax Llama called a norm's scale `weight`.
GPT2 = NameMap(
    (
        Rename(r".*\.attn\.(?:masked_)?bias", None),  # causal masks in old checkpoints
        Rename(r"((?:.*\.)?(?:wte|wpe))\.weight", r"\1/embedding"),
        Rename(r"((?:.*\.)?ln_\w+)\.weight", r"\1/scale"),
        Rename(r"(.*\.(?:c_attn|c_proj|c_fc|q_attn))\.weight", r"\1/kernel"),  # Conv1D, shape=(in, out)
        Rename(r"((?:.*\.)?(?:lm_head|score))\.weight", r"\1/kernel", axes=(1, 0)),
        Rename(r"(.*)\.bias", r"\1/bias"),
    )
)
LLAMA = NameMap(
    (
        Rename(r".*\.rotary_emb\.inv_freq", None),  # in old checkpoints
        Rename(r"((?:.*\.)?embed_tokens)\.weight", r"\1/embedding"),
        Rename(r"((?:.*[._])?(?:layer)?norm)\.weight", r"\1/scale"),
        Rename(r"(.*\.\w+_proj)\.weight", r"\1/kernel", axes=(1, 0)),
        Rename(r"((?:.*\.)?(?:lm_head|score))\.weight", r"\1/kernel", axes=(1, 0)),
        Rename(r"(.*)\.bias", r"\1/bias"),
    )
)
QWEN3 = LLAMA  # its norms of queries and keys are `q_norm` and `k_norm`

# Experts are stacked on axis 0 of `block_sparse_moe/experts/w1/kernel`, shape=(experts, in, out).
MIXTRAL = (
    NameMap(
        (
            Rename(r"(.*)\.experts\.(\d+)\.(w[123])\.weight", r"\1/experts/[\2]/\3/kernel", axes=(1, 0)),
            Rename(r"(.*\.gate)\.weight", r"\1/kernel", axes=(1, 0)),
        )
    )
    + LLAMA
)

_NAMES = {"gpt2": GPT2, "llama": LLAMA, "mixtral": MIXTRAL, "qwen3": QWEN3}


def by_name(name: NameMap | str) -> NameMap:
    """One of the maps here, or a "package.module:name", which is imported, also from the current folder.

    A map stays.

    Raises:
        ValueError: there is no such map.
    """
    if isinstance(name, NameMap):
        return name
    if isinstance(name, str) and name in _NAMES:
        return _NAMES[name]
    found = None
    if isinstance(name, str) and ":" in name:
        try:
            found = look_up(name)
        except (Exception, SystemExit) as error:  # the user's module may raise anything
            found = f"{type(error).__name__}: {error}"
    if not isinstance(found, NameMap):
        got = f"{name!r}" if found is None else f"{name!r}, which is {found}"
        raise ValueError(
            f"`mapping`: expected {', '.join(_NAMES)}, or package.module:name of a NameMap; got {got}."
        )
    return found
