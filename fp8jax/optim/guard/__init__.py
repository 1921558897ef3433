"""Guards of FP8 gradients and updates: arithmetic on their codes raises, or loses no weight in compiled code.

| file | holds |
|---|---|
| `lost_tags` | gradients that arithmetic changed before the optimizer |
| `replace_update` | updates that replace scaled weights, and what finds that arithmetic changed them |
| `spoilt_scales` | scales of weights that a step must not change, as NaNs from which they are restored |
"""
