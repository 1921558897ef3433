"""Classes that say what to do where JAX names them in an error of its own, as one of trees that differ."""


class ShowsRemedy(type):
    """The metaclass of a class that is printed as its `remedy`."""

    remedy: str

    def __repr__(cls) -> str:
        return cls.remedy
