"""Where beliefs begin: the prior of each prompt."""

from goldilocks.core.policy import Counts, Flat, Prior
from goldilocks.core.priors.forecast import Forecast
from goldilocks.core.priors.strata import Oracle, Strata

PRIORS = ("flat", "strata", "forecast", "oracle")

__all__ = ["PRIORS", "Counts", "Flat", "Forecast", "Oracle", "Prior", "Strata"]
