"""Goldilocks inside verl: the plug-in, its config groups, and what they register. Start reading at ``plugin.py``."""
