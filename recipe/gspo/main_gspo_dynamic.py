"""``python main_gspo_dynamic.py [key=value …]``: GSPO with dynamic sampling, the published run unless told otherwise.

It is ``goldilocks train`` with the config of this folder; ``task=arithmetic`` trains a tiny model on any machine.
"""

import sys
from pathlib import Path

from goldilocks.cli import main

CONFIG = Path(__file__).resolve().parent / "config" / "gspo_dynamic_sampling.yaml"

if __name__ == "__main__":
    sys.exit(main(["train", str(CONFIG), "task=gsm8k_3b", *sys.argv[1:]]))
