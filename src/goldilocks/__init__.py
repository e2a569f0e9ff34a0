"""Goldilocks: spend rollouts where they teach."""

__version__ = "0.1.0"
