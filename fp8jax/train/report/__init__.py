"""The display of a run while it trains, and its report at the end: a table, pictures, a page, and JSON."""

from fp8jax.train.report.outcome import Outcome as Outcome
from fp8jax.train.report.outcome import outcome_of as outcome_of
from fp8jax.train.report.progress import Progress as Progress
from fp8jax.train.report.report import machine as machine
from fp8jax.train.report.report import show as show
from fp8jax.train.report.report import write as write
