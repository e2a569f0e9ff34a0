"""The batch filter, where guides to it import it from."""

from goldilocks.filtering import PPOBatchFilter, PPOFilterConfig, TwoGateRejectionFilter

__all__ = ["PPOBatchFilter", "PPOFilterConfig", "TwoGateRejectionFilter"]
