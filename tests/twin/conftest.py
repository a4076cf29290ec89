"""The programs of this folder import one another by their plain names, as they do when they are run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
