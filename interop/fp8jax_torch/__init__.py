from fp8jax_torch.scaled import ScaledTensor as ScaledTensor
from fp8jax_torch.scaled import quantize as quantize
