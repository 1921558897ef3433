"""Storages of moments that are more than one array and its scale, in the table `STORAGES`."""

from fp8jax.optim.storage.base import Storage as Storage
from fp8jax.optim.storage.base import is_stored as is_stored
from fp8jax.optim.storage.blockwise import Blockwise as Blockwise
from fp8jax.optim.storage.e4m4 import RootE4M4 as RootE4M4
from fp8jax.optim.storage.int8 import LinearInt8 as LinearInt8
from fp8jax.optim.storage.square_root import Root as Root

# The storage of each name, see `state.stored_formats`.
STORAGES: dict[str, type[Storage]] = {
    storage.name: storage for storage in (Root, RootE4M4, LinearInt8, Blockwise)
}
