"""For all tests: Ctrl-C means Ctrl-C, also where they were started in the background, which ignores it; and an example
of hypothesis may take its time, since a busy machine is not a mistake."""

import signal

from hypothesis import HealthCheck, settings

signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
