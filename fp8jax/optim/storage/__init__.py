"""Storages of moments that are more than one array and its scale, in the table `STORAGES`."""

from fp8jax.optim.storage.base import Storage as Storage
from fp8jax.optim.storage.blockwise import Blockwise as Blockwise
from fp8jax.optim.storage.root import Root as Root

# The storage of each name, see `first_state.stored_formats`.
STORAGES: dict[str, type[Storage]] = {
    "root of FP16": Root,
    "8-bit blocks": Blockwise,
}
