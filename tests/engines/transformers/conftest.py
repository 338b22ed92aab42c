"""Lets the tests of this folder import `tiny_transformers`, whose models are made on the spot."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
