"""What a forecast of pass rates would have been worth in a run that is done."""

from goldilocks.forecast.hindsight import Hindsight, Outcomes, look_back, read_outcomes

__all__ = ["Hindsight", "Outcomes", "look_back", "read_outcomes"]
