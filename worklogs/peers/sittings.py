"""Which servers bench_peers.py starts, with which options, and what it measures of each start."""
import dataclasses

ALL = ("ours", "vllm", "llama", "transformers")
# What --only takes: the parts of the lines. `start` is a start and the memory after the long prompts.
PARTS = ("prefill", "warm", "decode", "front-end", "second", "int8", "dataset", "start")
LONGEST = 40_960
# Decoding is bound by memory, which a shared host reads 17 to 50 GB/s fast, changing within seconds: servers that are
# minutes apart would be measured on different machines. With transformers (7 GB) these would not fit into 24 GB.
TOGETHER = ("ours", "vllm", "llama")
CONTEXT = f"--max-model-len {LONGEST}"


@dataclasses.dataclass(frozen=True)
class Sitting:
    """One start of each server. parts: measured in it, in order. second: on the second slice. servers: which can.
    together: those of TOGETHER are up at once, and each measurement is made of one after the other. args, environment:
    of a server's own."""

    name: str
    parts: tuple[str, ...]
    servers: tuple[str, ...] = ALL
    second: bool = False
    together: bool = False
    args: dict[str, str] = dataclasses.field(default_factory=dict)
    environment: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)

    @property
    def checkpoint(self) -> str:
        """What tells its servers from others of their kind, for a trial of them."""
        return "int8" if self.environment else "second" if self.second else "first"


def _args(llama: str) -> dict[str, str]:
    # llama.cpp divides its context by its places, so how many of them is best depends on what is measured.
    return {"ours": CONTEXT, "vllm": CONTEXT, "llama": llama}


SITTINGS = (
    Sitting("long", ("prefill", "warm", "start"), args=_args(f"-np 1 -c {LONGEST}")),
    Sitting("streams", ("decode", "front-end"), together=True, args=_args("-np 16 -c 65536")),
    Sitting("second", ("second", ), second=True, together=True, args=_args("-np 16 -c 65536")),
    Sitting("int8", ("int8", ), ("ours", "llama"), together=True, args={
        "ours": f"{CONTEXT} --quantization int8_weight_only", "llama": "-np 1 -c 8192"},
        # Q8_0 has the head and all projections in eight bits; ours leaves these in bfloat16 unless it is told.
        environment={"ours": {"VLLM_OVERLAY_INT8_HEAD": "1", "VLLM_OVERLAY_INT8_LINEAR_ATTN": "1"},
                     "llama": {"QUANT": "q8_0"}}),
)
# What a server has no way to do: `generate` answers one request at a time and knows no prefix; only two have a front
# end and an engine.
LACKS = {"transformers": ("warm", "dataset", "front-end", "int8"), "llama": ("front-end", ), "ours": (), "vllm": ()}
DATASETS = ((64, 1), (64, 4), (256, 1), (256, 4))


def parts_of(sitting: Sitting, kind: str, only: tuple[str, ...]) -> tuple[str, ...]:
    """What is measured of a server in a sitting; nothing means that it need not be started."""
    if kind not in sitting.servers:
        return ()
    return tuple(part for part in sitting.parts if part in only and part not in LACKS[kind])


def runs_dataset(kind: str, tokens: int) -> bool:
    """Whether a server is sent the dataset with answers of so many tokens. llama.cpp, which takes longest by far, is
    held to those of 64 only."""
    return "dataset" not in LACKS[kind] and not (kind == "llama" and tokens == 256)


def streams_of(kind: str) -> int:
    """How many answers it can give at once, at most."""
    return 1 if kind == "transformers" else 16


def dataset_name(tokens: int, concurrency: int) -> str:
    """The name of a formal run among the sittings."""
    return f"dataset {tokens} tokens, {concurrency} at a time"
