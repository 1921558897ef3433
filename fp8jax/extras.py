"""Optional parts of fp8jax: what a message says about installing them."""


def install(extra: str) -> str:
    """How to install an extra of pyproject.toml. No package index has fp8jax yet: its source does."""
    return f"run `pip install '.[{extra}]'` in the folder of fp8jax's source"
