"""Entry point of ``patch_ops.sh``; run as a file: ``python -m`` would search the caller's folder for vLLM."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from patches.engine.cli import main  # noqa: E402  (the path is set first)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
