"""Where beliefs begin."""

from goldilocks.core.priors.base import Counts, Flat, Prior
from goldilocks.core.priors.forecast import Forecast
from goldilocks.core.priors.oracle import Oracle
from goldilocks.core.priors.strata import Strata

PRIORS = ("flat", "strata", "forecast", "oracle")

__all__ = ["PRIORS", "Counts", "Flat", "Forecast", "Oracle", "Prior", "Strata"]
