"""Entry point of ``patch_ops.sh``; run as a file, because ``python -m`` would put the caller's folder on the search path of vLLM."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from patches.engine.cli import main  # noqa: E402  (the path is set first)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
