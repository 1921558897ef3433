"""The interpreter of jaxprs: `find` follows parameters to the dots that use them, `evaluate` runs a jaxpr
with other dots in their place. `param_view` and `dots` describe a parameter and a dot for both."""
