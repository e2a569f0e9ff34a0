"""How many rollouts each prompt gets."""

from goldilocks.core.allocators.adaptive import Adaptive
from goldilocks.core.allocators.base import Allocator
from goldilocks.core.allocators.fixed import Fixed
from goldilocks.core.allocators.knapsack import Knapsack
from goldilocks.core.allocators.pilot import Pilot

ALLOCATORS: dict[str, type[Allocator]] = {
    "fixed": Fixed,
    "adaptive": Adaptive,
    "pilot": Pilot,
    "knapsack": Knapsack,
}

__all__ = ["ALLOCATORS", "Adaptive", "Allocator", "Fixed", "Knapsack", "Pilot"]
