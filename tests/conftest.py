"""For all tests: Ctrl-C means Ctrl-C, also where they were started in the background, which ignores it; verl has every
patch, as in a run of ours. hypothesis draws the same examples each time, so that no run fails by the luck of a draw,
and an example may take its time, since a busy machine is not a mistake; ``pytest --hypothesis-profile=thorough`` draws
others each time, and ten times as many."""

import os
import signal

from hypothesis import HealthCheck, settings

os.environ.setdefault("GOLDILOCKS_PATCHES", "all")
signal.signal(signal.SIGINT, signal.default_int_handler)
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("the same each time", patient, max_examples=50, derandomize=True)
settings.register_profile("thorough", patient, max_examples=500)
settings.load_profile("the same each time")
