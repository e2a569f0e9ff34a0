"""Which groups are kept."""

from goldilocks.core.filters.band import Band
from goldilocks.core.filters.base import Filter
from goldilocks.core.filters.chain import Chain
from goldilocks.core.filters.everything import Everything
from goldilocks.core.filters.length import Length
from goldilocks.core.filters.variance import Variance

FILTERS: dict[str, type[Filter]] = {"everything": Everything, "variance": Variance, "band": Band, "length": Length}

__all__ = ["FILTERS", "Band", "Chain", "Everything", "Filter", "Length", "Variance"]
