"""These tests need TRL: the extra ``trl``."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("trl") else ["test_*.py"]
