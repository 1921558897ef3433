"""The precision chart, read back from compiled programs.

    rows = [measure(recipe) for recipe in PRESETS]      # one train step each, on several devices
    print(table(rows))

A recipe declares a format for each kind of tensor. `measure` compiles a data-parallel train step of two
layers and reads the formats of its GEMM operands, collectives and arrays; it takes nothing from the recipe.
For a GPU that is not here, GEMMs are read from the optimized program. A CPU computes FP8 GEMMs in a wider
format, so there GEMMs are read from the lowered program. So is what has a scale, for all devices: a tensor or
blocks of it, and the scales' format. A "history" is an array of amaxes in the scaling state. "residuals" are
the activations that a scanned layer saves for its backward, read from the jaxpr. "needs" is what a training
loop must have for the recipe: nothing, a state beside the parameters, or `fp8jax.value_and_grad`.

| file | provides |
|---|---|
| `rows` | `measure`, `declare`, `lacking`: the rows; `text`, `as_data`, `picture`: their output |
| `readers` | the formats in a program, its arrays and a layer's jaxpr |
"""

from fp8jax.inspect.chart.rows import COLUMNS as COLUMNS
from fp8jax.inspect.chart.rows import Cell as Cell
from fp8jax.inspect.chart.rows import ChartRow as ChartRow
from fp8jax.inspect.chart.rows import as_data as as_data
from fp8jax.inspect.chart.rows import declare as declare
from fp8jax.inspect.chart.rows import lacking as lacking
from fp8jax.inspect.chart.rows import measure as measure
from fp8jax.inspect.chart.rows import new_figure as new_figure
from fp8jax.inspect.chart.rows import picture as picture
from fp8jax.inspect.chart.rows import table as table
from fp8jax.inspect.chart.rows import text as text
