"""Which layers of a model a recipe is for, and the report of it."""
