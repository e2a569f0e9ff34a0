"""Hydra config groups, found by verl's own command line: ``python -m verl.trainer.main_ppo +device=cpu …``."""
