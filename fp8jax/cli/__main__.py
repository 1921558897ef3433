"""`python -m fp8jax.cli`."""

import sys

from fp8jax.cli import main

sys.exit(main())
