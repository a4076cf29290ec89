"""Trains the twin; start it again with the same folder to go on where it stopped.

    python tests/twin/train.py RUN [--minutes 480] [--processes 2] [--go-on-from CHECKPOINT STEPS MINUTES]

RUN gets the tokenizer, state.pt (every five minutes), log.jsonl and, at the end, checkpoint/. `--minutes` are minutes
of processor time, of all processes together: what they used is counted, not what passed, so that a busy machine costs
time but no training. Batches depend on seed, step and process only. The last part trains the multi-token-prediction
head, with the rest frozen. Of an earlier training only the checkpoint is left: `--go-on-from` takes its weights and
counts its steps and minutes; the optimiser begins anew.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import evaluation
import torch
import torch.distributed as dist
import torch.nn.functional as F
from chats import TRAIN
from config import twin_config
from curriculum import Curriculum
from model import EMBEDDING, MTP, Network, Parameters, initial, rows_of
from muon import Optimizer
from packing import Batch, Encoded, encode, pack, step_random
from safetensors.torch import load_file
from tasks import TASKS, draw
from tokenizers import Tokenizer
from torch import Tensor

ROWS, LENGTH = 2, 1024
# Of the chats with files half are longer.
LEAST_LENGTH = 512
MUON_RATE, ADAM_RATE, WARM_STEPS = 0.02, 2e-3, 50
# Shares of the budget: where the rates begin to fall, and where the trunk is finished and the head's turn comes.
DECAY_FROM, TRUNK_END = 0.62, 0.93
UNEVEN = 0.01
SAVE_S, LOG_STEPS, EVALUATE_SHARE = 300, 20, 0.06


class TrainError(Exception):
    """What is there cannot be gone on from; one line."""


def resident_mb() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20


class Trainer:
    """One process of the training."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rank, self.processes = args, args.rank, args.processes
        self.run: Path = args.run
        self.tokenizer = Tokenizer.from_file(str(self.run / "tokenizer/tokenizer.json"))
        ids = {token.content: number for number, token in self.tokenizer.get_added_tokens_decoder().items()}
        self.config = twin_config(ids, self.tokenizer.get_vocab_size())
        self.network = Network(self.config, torch.float32 if args.float32 else torch.bfloat16)
        self.p: Parameters = {name: value.requires_grad_() for name, value in initial(self.config, args.seed).items()}
        self.optimizer = Optimizer(self.p, self.rank, self.processes, self.network.dtype)
        self.curriculum = Curriculum()
        # `first`: the step at which the optimiser began.
        self.step, self.first, self.used, self.started, self.evaluated = 0, 0, 0.0, time.process_time(), 0.0
        self.trunk, self.mtp = self.network.trunk, self.network.mtp
        if args.compile:
            self.trunk, self.mtp = (torch.compile(part, dynamic=False) for part in (self.trunk, self.mtp))
        self.head = {name for name in self.p if name.startswith(f"{MTP}.")}
        self.body = set(self.p) - self.head
        self.stop = self.told = False
        self.resume()

    # --- state

    def resume(self) -> None:
        path = self.run / "state.pt"
        if not path.exists():
            if self.args.go_on_from:
                self.go_on_from(*self.args.go_on_from)
            return
        try:
            state = torch.load(path, weights_only=True)
            with torch.no_grad():
                for name, value in state["parameters"].items():
                    self.p[name].copy_(value)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError, LookupError, TypeError) as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            raise TrainError(
                f"{path} is broken or of another model; without it, training begins anew: {why}"
            ) from error
        self.optimizer.state, self.optimizer.counts = state["optimizer"], state["counts"]
        self.curriculum.load(state["curriculum"])
        self.step, self.used, self.evaluated = state["step"], state["used"], state["evaluated"]
        self.first = state["first"]

    def go_on_from(self, checkpoint: str, steps: str, minutes: str) -> None:
        """The weights of a finished training, in bfloat16, and what it cost; every task at its last level.

        Raises:
            TrainError: their tokens are not those of this run.
        """
        own, theirs = self.run / "tokenizer/tokenizer.json", Path(checkpoint) / "tokenizer.json"
        if own.read_bytes() != theirs.read_bytes():
            raise TrainError(f"{self.run}/tokenizer is another one than that of {checkpoint}: take a new folder")
        values = load_file(Path(checkpoint) / "model.safetensors")
        with torch.no_grad():
            for name, value in self.p.items():
                value.copy_(values[name])
        self.curriculum.finish()
        self.step = self.first = int(steps)
        self.used = 60 * float(minutes)
        self.evaluated = self.fraction()

    def save(self) -> None:
        partial = self.run / "state.pt.partial"
        torch.save(
            {
                "parameters": {name: value.detach() for name, value in self.p.items()},
                "optimizer": self.optimizer.state,
                "counts": self.optimizer.counts,
                "curriculum": self.curriculum.state(),
                "step": self.step,
                "first": self.first,
                "used": self.used,
                "evaluated": self.evaluated,
            },
            partial,
        )
        partial.rename(self.run / "state.pt")

    def log(self, **values: Any) -> None:
        if self.rank == 0:
            with (self.run / "log.jsonl").open("a") as file:
                file.write(json.dumps({"step": self.step, "share": round(self.fraction(), 4), **values}) + "\n")

    # --- one step

    def fraction(self) -> float:
        """How much of the budget is used: of the steps where they are limited, or else of the processor time."""
        if self.args.steps:
            return self.step / self.args.steps
        return self.used / (60 * self.args.minutes)

    def batch(self) -> Batch:
        rng = step_random(self.args.seed, self.step, self.rank)

        def one() -> Encoded:
            while True:
                task, level = self.curriculum.choose(rng)
                sample = encode(self.tokenizer, draw(rng, task, level, TRAIN))
                if len(sample.ids) <= self.args.length:
                    sample.task, sample.level = task, level
                    return sample

        return pack(one, self.args.rows, self.args.length)

    def hidden(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Normalised hidden states, unevenness of the experts, embeddings and what the layers know of the rows."""
        x = F.embedding(batch.ids, self.p[EMBEDDING])
        if batch.pictures:
            flat = x.flatten(0, 1)
            parts = [self.network.picture(self.p, patches, grid) for _, grid, patches in batch.pictures]
            at = torch.cat(
                [
                    torch.arange(first, first + len(part))
                    for (first, _, _), part in zip(batch.pictures, parts, strict=True)
                ]
            )
            x = flat.index_put((at,), torch.cat(parts)).view_as(x)
        rows = rows_of(self.config, batch.chats, batch.positions, self.network.dtype)
        hidden, uneven = self.trunk(self.p, x, rows)
        return hidden, uneven, x, rows

    def logits(self, hidden: Tensor, at: Tensor) -> Tensor:
        return self.network.linear(hidden.flatten(0, 1)[at], self.p[EMBEDDING]).float()

    def train_step(self) -> dict[str, float]:
        fraction, head_only = self.fraction(), self.fraction() >= TRUNK_END
        batch = self.batch()
        if head_only:
            with torch.no_grad():
                hidden, uneven, x, rows = self.hidden(batch)
            following = F.pad(x, (0, 0, 0, 1))[:, 1:]
            logits = self.logits(self.mtp(self.p, hidden, following, rows), batch.at - 1)
        else:
            hidden, uneven, x, rows = self.hidden(batch)
            logits = self.logits(hidden, batch.at)
        loss = (F.cross_entropy(logits, batch.wanted, reduction="none") * batch.weight).sum() / batch.weight.sum()
        (loss if head_only else loss + UNEVEN * uneven).backward()
        names = self.head if head_only else self.body
        counts = self.counts(batch, logits)
        together = self.share_out(
            names,
            [
                loss.item(),
                float(uneven.detach()),
                float((batch.chats >= 0).sum()),
                time.process_time() - self.started,
                float(self.told),
                *counts,
            ],
        )
        self.started = time.process_time()
        # One process was told to stop: all do, after the same step.
        self.stop = together[4] > 0
        self.used += together[3] * self.processes
        rate = min(1.0, (self.step - self.first + 1) / WARM_STEPS)
        if head_only:
            rate *= max(0.02, (1 - fraction) / (1 - TRUNK_END))
        elif fraction > DECAY_FROM:
            rate *= max(0.02, (TRUNK_END - fraction) / (TRUNK_END - DECAY_FROM))
        self.optimizer.step(names, rate * MUON_RATE, rate * ADAM_RATE)
        for value in self.p.values():
            value.grad = None
        tasks = len(TASKS)
        if not head_only:
            self.curriculum.update(
                *(together[5 + part * tasks : 5 + (part + 1) * tasks] for part in range(3)), fraction
            )
        self.step += 1
        return {"loss": together[0], "uneven": together[1], "tokens": together[2] * self.processes, "rate": rate}

    def counts(self, batch: Batch, logits: Tensor) -> list[float]:
        """Per task: samples of its own level that are all right, how many there are, and their tokens."""
        wrong = torch.zeros(len(batch.samples), dtype=torch.long).index_add_(
            0, batch.owner, (logits.argmax(-1) != batch.wanted).long()
        )
        out = torch.zeros(3, len(TASKS))
        order = {task: index for index, task in enumerate(TASKS)}
        for sample, errors in zip(batch.samples, wrong.tolist(), strict=True):
            if sample.level == self.curriculum.level[sample.task]:
                out[:, order[sample.task]] += torch.tensor((float(errors == 0), 1.0, float(len(sample.ids))))
        # The mean over the processes is taken; a sum is wanted.
        return (out * self.processes).flatten().tolist()

    def share_out(self, names: set[str], numbers: list[float]) -> list[float]:
        """Averages the gradients of `names` over the processes, clips them, and averages the numbers."""
        grads = []
        for name in sorted(names):
            if self.p[name].grad is None:
                self.p[name].grad = torch.zeros_like(self.p[name])
            grads.append(self.p[name].grad)
        flat = torch.cat([torch.tensor(numbers, dtype=torch.float32), *(grad.flatten() for grad in grads)])
        if self.processes > 1:
            dist.all_reduce(flat)
            flat /= self.processes
        count = len(numbers)
        flat[count:] *= min(1.0, 1.0 / (float(flat[count:].norm()) + 1e-6))
        for grad, part in zip(grads, flat[count:].split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))
        return flat[:count].tolist()

    # --- the whole

    def train(self) -> None:
        saved = logged = time.monotonic()
        tokens = 0.0
        while self.fraction() < 1 and not self.stop:
            numbers = self.train_step()
            tokens += numbers["tokens"]
            if self.step % LOG_STEPS == 0:
                now = time.monotonic()
                accuracy = {task: round(self.curriculum.accuracy(task), 2) for task in self.curriculum.shares()}
                self.log(
                    loss=round(numbers["loss"], 4),
                    uneven=round(numbers["uneven"], 3),
                    rate=round(numbers["rate"], 3),
                    tokens_s=round(tokens / (now - logged)),
                    used_s=round(self.used),
                    accuracy=accuracy,
                    level={task: self.curriculum.level[task] for task in accuracy},
                )
                self.show(numbers["loss"], tokens / (now - logged), accuracy)
                logged, tokens = now, 0.0
            # The time is the same number everywhere, so all processes decide alike.
            if self.fraction() - self.evaluated >= EVALUATE_SHARE and self.args.evaluate:
                self.evaluated = self.fraction()
                self.evaluate(12)
            if time.monotonic() - saved > SAVE_S and self.rank == 0:
                self.save()
            if time.monotonic() - saved > SAVE_S:
                saved = time.monotonic()
                # The allocator keeps what it has been given back in pieces, gigabytes in an hour.
                before = resident_mb()
                ctypes.CDLL(None).malloc_trim(0)
                print(f"rank {self.rank}: {before} MB resident, {resident_mb()} MB after trimming", flush=True)
        if self.rank == 0:
            self.save()

    def show(self, loss: float, speed: float, accuracy: dict[str, float]) -> None:
        if self.rank:
            return
        done = min(1.0, self.fraction())
        left = (1 - done) / done * self.used / self.processes / 60 if done else 0.0
        bar = "#" * round(30 * done) + "." * (30 - round(30 * done))
        text = " ".join(f"{task}{self.curriculum.level[task]}:{value:.0%}" for task, value in accuracy.items())
        speeds = f"{speed:,.0f} tokens/s, {left:.0f} min of each core left"
        print(f"[{bar}] {done:6.1%} step {self.step} loss {loss:.3f} {speeds}  {text}", flush=True)

    @torch.no_grad()
    def evaluate(self, count: int) -> None:
        """Held-out samples, all answer tokens by argmax. One process does it; the others wait at the next step."""
        if self.rank:
            return
        results = evaluation.held_out(self, count)
        self.log(held_out=results)


def worker(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    if args.processes > 1:
        meeting = f"file://{(args.run / 'meeting').absolute()}"
        # On a busy machine one process may wait long for the other to compile or to judge.
        dist.init_process_group("gloo", init_method=meeting, rank=args.rank, world_size=args.processes,
                                timeout=datetime.timedelta(hours=6))
    trainer = Trainer(args)

    def tell(*_: Any) -> None:
        trainer.told = True

    signal.signal(signal.SIGTERM, tell)
    signal.signal(signal.SIGINT, tell)
    trainer.train()
    if args.rank == 0 and trainer.fraction() >= 1:
        from export import export

        trainer.log(held_out=evaluation.held_out(trainer, 48), used_s=round(trainer.used))
        export(trainer.p, trainer.config, args.run / "tokenizer", args.run / "checkpoint")
        print(f"done: {args.run / 'checkpoint'}", flush=True)
    if args.processes > 1:
        dist.barrier()
        dist.destroy_process_group()
    return 0


def launch(args: argparse.Namespace) -> int:
    """Starts the processes and waits; a signal to stop lets them save first."""
    args.run.mkdir(parents=True, exist_ok=True)
    (args.run / "meeting").unlink(missing_ok=True)
    if not (args.run / "tokenizer/tokenizer_config.json").exists() and args.go_on_from:
        # Weights know one numbering of the tokens, whatever text is made today.
        (args.run / "tokenizer").mkdir(exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(Path(args.go_on_from[0]) / name, args.run / "tokenizer" / name)
    elif not (args.run / "tokenizer/tokenizer_config.json").exists():
        subprocess.run(
            [sys.executable, str(Path(__file__).with_name("tokens.py")), str(args.run / "tokenizer")], check=True
        )
    # Memory of a step is kept for the next: otherwise the system zeroes it again and again.
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
        "MALLOC_TOP_PAD_": str(64 << 20),
        "TORCHINDUCTOR_CACHE_DIR": str(args.run / "compiled"),
    }
    commands = [[sys.executable, __file__, *sys.argv[1:], "--rank", str(rank)] for rank in range(args.processes)]
    children = [subprocess.Popen(command, env=environment) for command in commands]

    def stop(*_: Any) -> None:
        for child in children:
            child.terminate()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    while any(child.poll() is None for child in children):
        if any(child.poll() not in (None, 0) for child in children):
            stop()
        time.sleep(0.5)
    return max(abs(child.returncode) for child in children)


def refusal(args: argparse.Namespace) -> str:
    """What is wrong with the options, or nothing."""
    if args.processes < 1 or args.rows < 1 or args.steps < 0 or not args.minutes > 0:
        return "--processes, --rows and --minutes must be above 0, and --steps not below"
    if args.length < LEAST_LENGTH:
        return f"--length {args.length}: shorter rows than {LEAST_LENGTH} tokens have no room for some tasks"
    if args.go_on_from:
        checkpoint, steps, minutes = args.go_on_from
        if not (Path(checkpoint) / "model.safetensors").is_file():
            return f"--go-on-from {checkpoint} is no checkpoint: it has no model.safetensors"
        try:
            right = int(steps) >= 0 and float(minutes) >= 0
        except ValueError:
            right = False
        if not right:
            return f"--go-on-from: {steps} steps and {minutes} minutes are no numbers from 0"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument(
        "--minutes",
        type=float,
        default=480,
        help="processor time of all processes; default %(default)s: 4 hours of 2 cores",
    )
    parser.add_argument("--steps", type=int, default=0, help="end after so many steps instead")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rows", type=int, default=ROWS, help="of each process")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--go-on-from",
        nargs=3,
        metavar=("CHECKPOINT", "STEPS", "MINUTES"),
        help="weights of a finished training, and its steps and processor minutes, which count",
    )
    parser.add_argument("--float32", action="store_true", help="for processors that have no bfloat16 arithmetic")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--no-evaluate", dest="evaluate", action="store_false")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    why = refusal(args)
    if why:
        parser.error(why)
    try:
        return launch(args) if args.rank < 0 else worker(args)
    except TrainError as error:
        print(f"train: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
