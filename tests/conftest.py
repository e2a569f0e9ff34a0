"""For all tests: Ctrl-C means Ctrl-C, also where they were started in the background, which ignores it."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
