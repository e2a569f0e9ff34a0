"""The core against a simulated engine: what would a policy cost on my data? No model, no GPU."""

from goldilocks.simulate.engine import EngineConfig, SimulatedEngine
from goldilocks.simulate.pass_rates import PassRates, mixture, read_pass_rates
from goldilocks.simulate.run import Comparison, Outcome, Setup, batches, recipe_settings, simulate

__all__ = [
    "Comparison",
    "EngineConfig",
    "Outcome",
    "PassRates",
    "Setup",
    "SimulatedEngine",
    "batches",
    "mixture",
    "read_pass_rates",
    "recipe_settings",
    "simulate",
]
