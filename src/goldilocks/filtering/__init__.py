"""Which rows of a finished tensor batch are trained. Needs torch; verl is not imported."""

from goldilocks.filtering.batch_filter import PPOBatchFilter
from goldilocks.filtering.config import PPOFilterConfig
from goldilocks.filtering.padding import pad_batch

__all__ = ["PPOBatchFilter", "PPOFilterConfig", "pad_batch"]
