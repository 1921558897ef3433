"""The parts of a compiled training step: networks of Linen and NNX, optimizer, placement, batch size."""
