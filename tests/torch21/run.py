"""What `make test-torch21` runs in .venv-torch21: our code on the Python, torch and transformers of the vendor's image.

Without VENDOR_TREE: stock 0.6.3's source with the overlay. Nothing is compiled; the few operators that stock would take
from its extension are stock_C.py. The operators, the engine's parts and the model run as in `make test`.

With VENDOR_TREE=/path/to/vllm (the vendor's files, of which nothing may ever be committed): a copy of those with the
overlay, which must find the pin corex-3.2.3 and no drift, and standins/ for the vendor's libraries; more suites, the
demo server, and conversation.py.

The suites see a machine without a GPU (no_gpu/). The conversation does not: the vendor's files then take it for a CUDA
machine, as they do on the card, and only `--device cpu` and the "cpu" in the distribution's version say where to
compute. plugin.py names what is skipped. The result is kept in remote_results/.
"""
from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tests.run import Result, conclude, keep, run_all  # noqa: E402

HERE = ROOT / "tests/torch21"
USER_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
CACHE = Path(os.environ.get("VLLM_OVERLAY_CACHE") or USER_CACHE / "vllm-overlay")
SUITES = ("overlay/kernels", "overlay/grammar", "overlay/hybrid", "overlay/attention", "overlay/test_rebind.py",
          "chat_template", "core", "models", "worker")
VENDOR_SUITES = ("overlay", "chat_template", "core", "models", "worker", "engine", "entrypoints", "e2e")
PACKAGES = ("torch", "triton", "transformers", "tokenizers", "numpy", "pydantic", "fastapi", "starlette", "uvicorn")


class Refused(Exception):
    """One line that says what to do."""


def stock_tree(site: Path) -> Path:
    """Lays stock's source into `site` and returns its folder."""
    archive = CACHE / "vllm-0.6.3.tar.gz"
    if not archive.is_file():
        raise Refused(f"{archive} is missing: bash requirements/setup.sh torch21 downloads it")
    with tempfile.TemporaryDirectory() as unpacked:
        with tarfile.open(archive) as tar:
            tar.extractall(unpacked)
        shutil.copytree(Path(unpacked, "vllm-0.6.3/vllm"), site / "vllm")
    shutil.copy(HERE / "stock_C.py", site / "vllm/_C.py")
    # Released wheels have it, the source package does not.
    (site / "vllm/_version.py").write_text('__version__ = "0.6.3"\n__version_tuple__ = (0, 6, 3)\n')
    return site / "vllm"


def vendor_tree(source: Path, site: Path) -> Path:
    """Copies the vendor's files into `site` and returns their folder."""
    if not (source / "_custom_ops.py").is_file():
        raise Refused(f"VENDOR_TREE={source} is not the vendor's vllm folder: _custom_ops.py is missing")
    shutil.copytree(source, site / "vllm", ignore=shutil.ignore_patterns("__pycache__"))
    return site / "vllm"


def lay_overlay(tree: Path, pin: str, version: str) -> str:
    """Applies the overlay and makes the distribution's metadata. Returns the manifest's hash.

    Raises:
        Refused: the engine refuses the tree, or takes it for another pin, or sees drift.
    """
    metadata = tree.parent / f"vllm-{version}.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    done = subprocess.run(["bash", ROOT / "patch_ops.sh", "--root", tree, "apply"], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, env={**os.environ, "PYTHON": sys.executable})
    if done.returncode:
        raise Refused(f"the overlay cannot be applied:\n{done.stdout}")
    receipt = json.loads((tree / "overlay/receipt.json").read_text())
    if receipt["pin"] != pin or receipt["drift"]:
        raise Refused(f"the tree passes for pin {receipt['pin']} with drift in {len(receipt['drift'])} files, "
                      f"not for {pin}")
    return receipt["manifest"]


def suites(names: tuple[str, ...], label: str, path: list[Path]) -> list[Result]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.torch21.plugin"]
    jobs = {f"{label}: {name}": [*command, f"tests/{name}"] for name in names}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(each) for each in [*path, ROOT]),
                   "PYTHON": sys.executable, "VLLM_OVERLAY_CPU_PYTHON": str(ROOT / ".venv/bin/python")}
    return run_all(jobs, 2, environment)[0]


def main() -> int:
    vendor = os.environ.get("VENDOR_TREE", "")
    with tempfile.TemporaryDirectory(prefix="test-torch21-") as folder:
        site = Path(folder)
        try:
            if vendor:
                pin = "corex-3.2.3"
                manifest = lay_overlay(vendor_tree(Path(vendor), site), pin, "0.6.3+corex.3.2.3.cpu")
            else:
                pin = "pypi-0.6.3"
                manifest = lay_overlay(stock_tree(site), pin, "0.6.3+cpu")
        except Refused as why:
            print(f"test-torch21: {why}", file=sys.stderr)
            return 2
        if vendor:
            results = suites(VENDOR_SUITES, pin, [site, HERE / "no_gpu", HERE / "standins"])
            results += suites(("torch21/conversation.py",), pin, [site, HERE / "standins"])
        else:
            results = suites(SUITES, pin, [site])
            print("SKIPPED the vendor's files: VENDOR_TREE=/path/to/vllm makes them run too")
    totals = {kind: sum(result.counts[kind] for result in results) for kind in ("passed", "failed", "skipped")}
    keep(results, totals, "test-torch21", pin=pin, manifest=manifest,
         packages={name: importlib.metadata.version(name) for name in PACKAGES})
    return conclude(totals)


if __name__ == "__main__":
    sys.exit(main())
