"""Replays the shape of the recorded traffic through rules for a hybrid model's prefix cache, and says what each finds.

    python worklogs/cache_sim.py                                   every rule, with the target's memory
    python worklogs/cache_sim.py --rule server --vary device=16,32,64,128 --vary half_life=0.125,0.25,0.5
    python worklogs/cache_sim.py --rule server --set device=64 --set grid_share=0 --seed 1 --keep

The trace is synthetic (replay_trace.py says what is known of the real one and what is assumed), the time simple
(cache_model.py). `server` is the server's own code, overlay/prefix_cache/{policy,checkpoints}.py of this working tree.
The memory is one card's of four: what the plan leaves for KV is shared between KV (--kv-bytes per token) and `device`
checkpoints (--slot-bytes each); `host` checkpoints cost it nothing. The other rules, which know no host, get device +
host slots and pay for the device's only.

Columns: hit = tokens restored / tokens of prompts; again = tokens (thousands) computed although an earlier prompt had
them, of these `no state` with their KV there and no checkpoint; checkpoints taken, given up for others, dropped with
their KV; MiB moved to the host and restored from it.
"""
import argparse
import dataclasses
import importlib
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench_record  # noqa: E402
import replay_trace  # noqa: E402
from cache_model import KvPool, Outcome, ServerStore, SimpleStore, Store, replay  # noqa: E402
from replay_trace import BLOCK, Request  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
# What `python -m vllm.overlay.plan` leaves one card for KV with the settings of computility-run.yaml.
KV_TOKENS, KV_BYTES, SLOT_BYTES = 957_888, 10_240, 16_149_000
MIB = 1 << 20
UNLIMITED = 1 << 40
ALIGNED = 1152
RULES = {
    "server": "the server's",
    "no-grid": "the server's, without grid points",
    "lru": "message boundaries, last block, partings; the least recently used goes",
    "fifo": "the same places; the oldest goes",
    "ends": "ends of prompts and answers only (SGLang on CPU)",
    "align": f"ends of steps and of prompts, cut to blocks of {ALIGNED} tokens (vLLM's align mode)",
    "llama": "4 and 516 tokens before a prompt's end, the last message (llama.cpp's places)",
    "any": "a checkpoint at every block costs nothing: what the KV alone allows",
    "unlimited": "and KV costs nothing either",
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One replay: rule, slots, and changed fields of the server's policy."""

    rule: str
    device: int
    host: int
    policy: tuple[tuple[str, float], ...] = ()

    def text(self) -> str:
        """For the table."""
        return " ".join([self.rule, *(f"{name}={value:g}" for name, value in self.policy)])


def server_classes() -> tuple[Any, Any]:
    """Policy and CheckpointStore of this working tree, without vLLM, which need not be installed."""
    package = types.ModuleType("vllm")
    package.__path__ = [str(ROOT / "vllm_overrides")]
    sys.modules.setdefault("vllm", package)
    return (importlib.import_module("vllm.overlay.prefix_cache.policy").Policy,
            importlib.import_module("vllm.overlay.prefix_cache.checkpoints").CheckpointStore)


def places(rule: str, piece: int) -> Callable[[Request, int, int], Sequence[int]]:
    """Where a rule other than the server's takes checkpoints: (request, hit, known blocks) -> positions."""

    def every_block(request: Request, hit: int, known: int) -> Sequence[int]:
        return range(BLOCK, request.length, BLOCK)

    def messages(request: Request, hit: int, known: int) -> Sequence[int]:
        return [*request.boundaries, (request.length - 1) // BLOCK * BLOCK, known * BLOCK]

    def ends(request: Request, hit: int, known: int) -> Sequence[int]:
        return [(request.length - 1) // BLOCK * BLOCK]

    def aligned(request: Request, hit: int, known: int) -> Sequence[int]:
        steps = range(hit + piece, request.length, piece)
        return [place // ALIGNED * ALIGNED for place in (*steps, request.length - 1)]

    def llama(request: Request, hit: int, known: int) -> Sequence[int]:
        return [request.length - 516, request.length - 4, *request.boundaries[-2:-1]]

    return {"lru": messages, "fifo": messages, "ends": ends, "align": aligned, "llama": llama}.get(rule, every_block)


def run(setting: Setting, requests: Sequence[Request], reusable: Sequence[int], arguments: argparse.Namespace,
        classes: tuple[Any, Any], progress: Callable[[int], None] = lambda index: None) -> Outcome:
    """One replay.

    Raises:
        ValueError: the policy has no such field, or the KV that is left does not hold the longest request.
    """
    blocks = (arguments.kv_tokens * arguments.kv_bytes - setting.device * arguments.slot_bytes) // (
        BLOCK * arguments.kv_bytes)
    kv = KvPool(UNLIMITED if setting.rule == "unlimited" else blocks)
    store: Store
    if setting.rule in ("server", "no-grid"):
        changed = {"grid_share": 0.0} if setting.rule == "no-grid" else {}
        try:
            policy = classes[0](**changed, **{name: int(value) if value == int(value) and value else value
                                              for name, value in setting.policy})
        except TypeError as error:
            raise ValueError(f"the policy does not take this: {error}") from error
        store = ServerStore(classes[1], policy, setting.device, setting.host, kv, arguments.piece)
    else:
        slots = UNLIMITED if setting.rule in ("any", "unlimited") else setting.device + setting.host
        store = SimpleStore(slots, places(setting.rule, arguments.piece), touch=setting.rule != "fifo",
                            ends=setting.rule in ("ends", "lru", "fifo"))
    return replay(requests, reusable, kv, store, arguments.concurrency, arguments.prefill_rate, arguments.decode_rate,
                  not arguments.no_wait, progress)


def settings(arguments: argparse.Namespace) -> list[Setting]:
    """What --rule, --set and --vary ask for: each value that varies, by itself."""
    base = dict(arguments.set)
    found: list[Setting] = []
    for rule in arguments.rule or list(RULES):
        variants = [base]
        if rule == "server":
            variants += [{**base, name: value} for name, values in arguments.vary for value in values]
        for fields in variants:
            policy = tuple(pair for pair in fields.items() if pair[0] not in ("device", "host"))
            setting = Setting(rule, int(fields.get("device", arguments.device)),
                              int(fields.get("host", arguments.host)),
                              policy if rule in ("server", "no-grid") else ())
            if setting not in found:
                found.append(setting)
    return found


HEADER = f"{'rule':34s} {'device':>6s} {'host':>5s} {'hit':>6s} {'again':>7s} {'no state':>8s} {'taken':>7s} " \
         f"{'evicted':>7s} {'dropped':>7s} {'to host':>8s} {'from host':>9s}"


def line(setting: Setting, outcome: Outcome, slot_bytes: int) -> str:
    """A row of the table."""
    unlimited = setting.rule in ("any", "unlimited")
    return (f"{setting.text():34s} {'-' if unlimited else setting.device:>6} {'-' if unlimited else setting.host:>5} "
            f"{outcome.hit_rate:6.3f} {outcome.again // 1000:7d} {outcome.known // 1000:8d} "
            f"{outcome.checkpoints_taken:7d} {outcome.checkpoints_evicted:7d} {outcome.checkpoints_dropped:7d} "
            f"{outcome.checkpoints_demoted * slot_bytes // MIB:8d} {outcome.restored_from_host * slot_bytes // MIB:9d}")


def _set(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    return name, float(value)


def _vary(text: str) -> tuple[str, list[float]]:
    name, _, values = text.partition("=")
    return name, [float(value) for value in values.split(",")]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog="Rules:\n" + "\n".join(f"  {name:10s} {RULES[name]}" for name in RULES))
    parser.add_argument("--rule", action="append", choices=list(RULES), help="may be repeated; default: all")
    parser.add_argument("--device", type=int, default=60, help="checkpoints on the device (default: %(default)s)")
    parser.add_argument("--host", type=int, default=533, help="checkpoints on the host (default: %(default)s, 8 GiB)")
    parser.add_argument("--set", action="append", type=_set, default=[], metavar="NAME=VALUE",
                        help="device, host or a field of the server's policy")
    parser.add_argument("--vary", action="append", type=_vary, default=[], metavar="NAME=V1,V2,...",
                        help="replay once more with each value; the same names")
    parser.add_argument("--seed", type=int, default=0, help="of the trace")
    parser.add_argument("--count", type=int, help="only the first requests")
    parser.add_argument("--inside", type=float, default=0.1,
                        help="share of the rewritten turns that leave the last prompt inside a message")
    parser.add_argument("--answers", choices=("recorded", "ours"), default="recorded", help="in histories")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--prefill-rate", type=float, default=2000.0, help="tokens/s; assumed, decides what overlaps")
    parser.add_argument("--decode-rate", type=float, default=20.0, help="tokens/s of a stream; assumed")
    parser.add_argument("--piece", type=int, default=16384, help="tokens that one step computes")
    parser.add_argument("--no-wait", action="store_true", help="no request waits for another's prefix")
    parser.add_argument("--kv-tokens", type=int, default=KV_TOKENS, help="KV capacity without device checkpoints")
    parser.add_argument("--kv-bytes", type=int, default=KV_BYTES, help="per token and rank")
    parser.add_argument("--slot-bytes", type=int, default=SLOT_BYTES, help="of one checkpoint, per rank")
    parser.add_argument("--keep", type=Path, nargs="?", const=bench_record.RESULTS, metavar="FOLDER",
                        help="keep a record, too, in remote_results/ if no folder is named")
    parser.add_argument("--no-progress", action="store_true")
    options = parser.parse_args(arguments)
    for name in ("concurrency", "piece", "kv_tokens", "kv_bytes", "slot_bytes"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)} is too small")
    return options


def main(arguments: list[str] | None = None, classes: tuple[Any, Any] | None = None) -> int:
    """Returns the exit code. classes: Policy and CheckpointStore, if not those of this working tree."""
    options = parse(arguments)
    start = time.perf_counter()
    try:
        requests = replay_trace.build(options.seed, count=options.count, inside=options.inside, answers=options.answers)
        reusable = replay_trace.reusable(requests)
        prompt = sum(request.length for request in requests)
        print(f"{len(requests)} requests, {prompt:,} tokens, {sum(reusable) / prompt:.3f} of them reusable; "
              f"{options.concurrency} at a time", flush=True)
        print(HEADER, flush=True)
        found = []
        for setting in settings(options):
            def progress(index: int, setting: Setting = setting) -> None:
                if not options.no_progress and not index % 16:
                    print(f"\r{setting.text()}: {index} of {len(requests)}", end="", file=sys.stderr, flush=True)
            outcome = run(setting, requests, reusable, options, classes or server_classes(), progress)
            if not options.no_progress:
                print("\r\033[K", end="", file=sys.stderr)
            print(line(setting, outcome, options.slot_bytes), flush=True)
            found.append({**dataclasses.asdict(setting), "hit_rate": round(outcome.hit_rate, 5),
                          "bytes_to_host": outcome.checkpoints_demoted * options.slot_bytes,
                          "bytes_from_host": outcome.restored_from_host * options.slot_bytes,
                          **dataclasses.asdict(outcome)})
    except (ValueError, OSError) as error:
        print(f"cache_sim: {error}", file=sys.stderr)
        return 1
    if options.keep:
        words = [Path(sys.argv[0]).name, *(sys.argv[1:] if arguments is None else arguments)]
        path = bench_record.keep("cache-sim", {
            "kind": "cache-sim", **bench_record.commit(), "command": bench_record.without_paths(words),
            "assumed": {name: value for name, value in vars(options).items() if name not in ("keep", "no_progress")},
            "requests": len(requests), "prompt_tokens": prompt, "reusable_tokens": sum(reusable),
            "seconds": round(time.perf_counter() - start, 1), "outcomes": found}, options.keep)
        print(f"kept as {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
