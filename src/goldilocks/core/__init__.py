"""The decisions, without I/O: this package generates no token, loads no model, opens no file and starts no thread.

The caller says what happened (``observe``) and asks what to do (``requests``, ``cancelled``, ``take``).
"""

from goldilocks.core.accounts import Accounts
from goldilocks.core.allocators import build_allocator
from goldilocks.core.beliefs import Beliefs
from goldilocks.core.collector import Collector
from goldilocks.core.filters import build_filter
from goldilocks.core.limits import Exhausted, Limits, Surplus
from goldilocks.core.selectors import build_selector
from goldilocks.core.source import ListSource, Source

__all__ = [
    "Accounts",
    "Beliefs",
    "Collector",
    "Exhausted",
    "Limits",
    "ListSource",
    "Source",
    "Surplus",
    "build_allocator",
    "build_filter",
    "build_selector",
]
