"""What is taken for granted of TRL: the functions that are overridden or called, and the sources they were read in.

A TRL whose functions are others is said to be so before training, by name: its results may differ from what the tests
have seen.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from inspect import signature
from typing import Any

import trl
from trl import GRPOTrainer, RLOOTrainer

from goldilocks.hashing import digest

logger = logging.getLogger(__name__)

VERSIONS = "1.0 to 1.16"

# Digests of each function of ``GRPOTrainer``, one for every source that a supported version has.
KNOWN: dict[str, tuple[str, ...]] = {
    "_generate_and_score_completions": (
        "7578951ff1d1ce59", "30ac28fb78523bee", "120bc9d4f91c2800", "a27ed93ae775b06c", "cc04f6e0d510841a",
        "4d7067ac127d0915", "86fe62ce5c510264", "da3b7eb07b6398e7", "db028931a84025f2", "2deae91942535170",
        "e03ed7a34c24a6b3", "1fa48922792dcd5c",
    ),
    "_calculate_rewards": (
        "c42fccd5ae0793bd", "30a2e3b4efe321ca", "a34bc902a25f9901", "485998a82350676b", "736ae29b083840b5",
    ),
    "_prepare_inputs": ("f824e7fb07147956",),
    "_get_per_token_logps_and_entropies": (
        "2a1b927a527f7658", "4eaf29e63e9edce1", "f6a06497779df70e", "4af3691399f30834", "1f88afa27d61b617",
        "331ae01b88d8e2cf", "dc17fee20840b7eb", "ea73c3909275851d",
    ),
}  # fmt: skip

# Those of ``RLOOTrainer``: its rewards and its batch are 1.16's, the rest is ``GRPOTrainer``'s own text.
KNOWN_RLOO: dict[str, tuple[str, ...]] = {
    **KNOWN,
    "_generate_and_score_completions": ("93ebbf5e70d31778",),
    "_calculate_rewards": ("81ef76d93756be6f",),
}

# What ``_get_per_token_logps_and_entropies`` returns: log-probs and entropies, and later a router's loss too.
RETURNED = 3 if "compute_aux_loss" in signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters else 2


def changed(trainer: type[Any]) -> list[str]:
    """Return the functions of TRL's trainer that are not those Goldilocks was written for."""
    known = KNOWN_RLOO if issubclass(trainer, RLOOTrainer) else KNOWN
    return [name for name, digests in known.items() if digest(getattr(trainer, name)) not in digests]


def check_engine(trainer: type[Any]) -> None:
    """The one more function that the engine takes the place of."""
    if not hasattr(trainer, "_generate_single_turn"):
        name = trainer.__name__
        raise ImportError(f"engine_slots: this TRL has no {name}._generate_single_turn to put the engine into")


def check_trl(trainer: type[Any]) -> None:
    """Warn where TRL has changed under our feet; say plainly what is missing."""
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
