"""Goldilocks inside verl: the plug-in, its config groups, and what they register. ``plugin.py`` is the way in."""
