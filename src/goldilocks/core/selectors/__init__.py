"""Which prompts come next."""

from goldilocks.core.selectors.base import Selector
from goldilocks.core.selectors.greso import Greso
from goldilocks.core.selectors.thompson import Thompson
from goldilocks.core.selectors.uniform import Uniform

SELECTORS: dict[str, type[Selector]] = {"uniform": Uniform, "greso": Greso, "thompson": Thompson}

__all__ = ["SELECTORS", "Greso", "Selector", "Thompson", "Uniform"]
