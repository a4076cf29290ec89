"""The demo checkpoint of `make serve`, built once and kept in the cache of test inputs."""
from __future__ import annotations

import functools
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers.tokenizer import cache_folder, tokenizer_folder

WORKLOGS = Path(__file__).resolve().parents[2] / "worklogs"


@functools.lru_cache
def demo_checkpoint() -> Path:
    """Its folder; its name holds a digest of the programs that make it and of the tokenizer."""
    digest = hashlib.sha256(tokenizer_folder().name.encode())
    for name in ("make_demo_checkpoint.py", "random_checkpoint.py"):
        digest.update((WORKLOGS / name).read_bytes())
    folder = cache_folder() / f"demo-{digest.hexdigest()[:16]}"
    if not (folder / "config.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, WORKLOGS / "make_demo_checkpoint.py", folder, "--tokenizer",
                        tokenizer_folder()], check=True)
    return folder
