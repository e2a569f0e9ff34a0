"""For all tests: Ctrl-C means Ctrl-C, also where they were started in the background, which ignores it; an example of
hypothesis may take its time, since a busy machine is not a mistake; and verl has every patch, as in a run of ours."""

import os
import signal

from hypothesis import HealthCheck, settings

os.environ.setdefault("GOLDILOCKS_PATCHES", "all")
signal.signal(signal.SIGINT, signal.default_int_handler)
for profile, examples in (("any machine", 50), ("thorough", 500)):  # pytest --hypothesis-profile=thorough
    settings.register_profile(
        profile, max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile("any machine")
