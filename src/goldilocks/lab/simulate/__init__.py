"""The core against a simulated engine: what would a policy cost on my data? No model, no GPU."""

from goldilocks.lab.simulate.engine import EngineConfig, SimulatedEngine
from goldilocks.lab.simulate.pass_rates import PassRates, mixture, read_pass_rates
from goldilocks.lab.simulate.run import Comparison, Outcome, Setup, batches, recipe_settings, simulate

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
