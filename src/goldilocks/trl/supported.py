"""What is taken for granted of TRL: the functions that are overridden or called, and the sources they were read in.

A TRL whose functions are others is said to be so before training, by name: its results may differ from what the tests
have seen.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import trl
from trl import RLOOTrainer

from goldilocks.hashing import digest

logger = logging.getLogger(__name__)

VERSIONS = "1.14 to 1.16"

# Digests of each function of ``GRPOTrainer``, one for every source that a supported version has.
KNOWN: dict[str, tuple[str, ...]] = {
    "_generate_and_score_completions": ("2deae91942535170", "e03ed7a34c24a6b3", "1fa48922792dcd5c"),
    "_calculate_rewards": ("736ae29b083840b5",),
    "_prepare_inputs": ("f824e7fb07147956",),
    "_get_per_token_logps_and_entropies": ("dc17fee20840b7eb", "ea73c3909275851d"),
}

# Those of ``RLOOTrainer``: its rewards and its batch are 1.16's, the rest is ``GRPOTrainer``'s own text.
KNOWN_RLOO: dict[str, tuple[str, ...]] = {
    **KNOWN,
    "_generate_and_score_completions": ("93ebbf5e70d31778",),
    "_calculate_rewards": ("81ef76d93756be6f",),
}


def changed(trainer: type[Any]) -> list[str]:
    """Return the functions of TRL's trainer that are not those Goldilocks was written for."""
    known = KNOWN_RLOO if issubclass(trainer, RLOOTrainer) else KNOWN
    return [name for name, digests in known.items() if digest(getattr(trainer, name)) not in digests]


def check_trl(trainer: type[Any]) -> None:
    """Warn of functions that differ from those of the tested versions; raise ``ImportError`` where one is missing."""
    kind, versions = ("RLOOTrainer", "1.16") if issubclass(trainer, RLOOTrainer) else ("GRPOTrainer", VERSIONS)
    missing = [name for name in KNOWN if not hasattr(trainer, name)]
    if missing:
        raise ImportError(f"this TRL has no {kind}.{', '.join(missing)}; Goldilocks works with TRL {versions}")
    warn_of([f"{kind}.{name}" for name in changed(trainer)], versions)


def warn_of(names: Sequence[str], versions: str) -> None:
    """Name functions of TRL that are not those of the tested versions."""
    if names:
        message = "TRL %s has another %s than TRL %s: Goldilocks was not tested with it"
        logger.warning(message, trl.__version__, ", ".join(names), versions)
