"""Decisions do not depend on the CPU's kind: without its vector instructions a simulation prints the same table."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from numpy._core import _multiarray_umath as numpy_core

USED = [name for name in numpy_core.__cpu_dispatch__ if numpy_core.__cpu_features__.get(name)]
COMMAND = [sys.executable, "-m", "goldilocks.cli", "simulate", "--rollouts", "6000", "--json"]
POLICIES = ["--policy", "thompson", "--policy", "frontier", "--policy", "knapsack"]


@pytest.mark.skipif(not USED, reason="this CPU has no instructions that NumPy could do without")
def test_a_simulation_is_the_same_without_the_cpus_vector_instructions() -> None:
    tables = [
        subprocess.run(
            [*COMMAND, *POLICIES], env={**os.environ, **without}, check=True, capture_output=True, text=True
        ).stdout
        for without in ({}, {"NPY_DISABLE_CPU_FEATURES": " ".join(USED)})
    ]
    assert tables[0] == tables[1]
