"""The parts of a compiled training step: the learner, its optimizer, its placement, and its batch size."""
