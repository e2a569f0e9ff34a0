"""The trainers: what happens to a batch once it is full."""

# verl's trainers import ours at the end of their own import (``goldilocks.verl.plugin``). Importing them first makes
# every module of this package importable on its own, whichever comes first.
import verl.trainer.ppo.v1  # noqa: F401
