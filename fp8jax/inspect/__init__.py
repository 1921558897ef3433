"""What a program will do, read from the compiled program: chart, GEMMs, memory and devices.

| file | provides |
|---|---|
| `targets` | GPUs that are not here, to compile for |
| `program/` | GEMMs, collectives, kernels and memory of a compiled program |
| `chart` | the precision chart, read back from compiled train steps |
| `gemms` | the GEMMs of a model, layer by layer, next to its report |
| `memory/` | the bytes of a training step |
| `machine` | formats that the devices here multiply natively |
| `models` | models to look at a recipe with |
"""
