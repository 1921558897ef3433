"""Guards of FP8 gradients and updates: arithmetic on their codes raises, or loses no weight in compiled code.

| file | holds |
|---|---|
| `lost_tags` | gradients that arithmetic changed before the optimizer |
| `replace_update` | updates that replace scaled weights, their check, and spoilt scales of weights |
"""
