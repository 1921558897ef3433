"""A run of `fit`: its steps, its validations, and what is checked before and after them."""
