"""Puts the repository root on sys.path, so that the tests import the scripts as a user runs them."""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
torch.set_num_threads(1)  # the models are tiny: more threads only spin, and on busy cores that is many times slower
