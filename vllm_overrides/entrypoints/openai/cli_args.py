"""Stock's command line and the options of vllm.overlay.serving."""

import argparse
from collections.abc import Callable
from typing import Any

from vllm.entrypoints.openai import cli_args_stock as _stock
from vllm.utils import FlexibleArgumentParser


def make_arg_parser(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
    """Add stock's options and ours to ``parser``."""
    parser = _stock.make_arg_parser(parser)
    # Stock takes one.
    keys = next(action for action in parser._actions if action.dest == "api_key")
    keys.nargs, keys.metavar, keys.help = "+", "KEY", "requests below /v1 must bring one of these keys"
    # Stock's text says 1 for everybody.
    pictures = next(action for action in parser._actions if action.dest == "limit_mm_per_prompt")
    pictures.help = ("how many pictures a request may have: image=N. Default: any number for the models of this "
                     "overlay, 1 for others")
    group = parser.add_argument_group("options of the overlay")
    group.add_argument("--reasoning-parser", default=None,
                       help="split thoughts off the answer: qwen3. Default: they stay in the content.")
    group.add_argument("--reasoning-field", default="reasoning_content", choices=["reasoning_content", "reasoning"],
                       help="the field of message and delta that holds the thought")
    group.add_argument("--generation-config", default="auto", metavar="{auto,vllm,FOLDER}",
                       help="where sampling defaults of silent requests come from: auto = generation_config.json "
                       "of the model, vllm = none (temperature 1, all else neutral), or a folder with such a file")
    group.add_argument("--default-chat-template-kwargs", default=None, metavar="JSON",
                       help="variables of the chat template for requests that do not set them, such as "
                       '\'{"enable_thinking": false}\'')
    group.add_argument("--trust-request-chat-template", action="store_true",
                       help="let a request bring its own chat template, a program that the server then runs")
    group.add_argument("--max-picture-pixels", type=int, default=None, metavar="N",
                       help="a larger picture is resized down to this many pixels. Default: longest_edge of the "
                       "model's preprocessor_config.json (16777216: 16384 tokens)")
    group.add_argument("--max-picture-tokens", type=int, default=None, metavar="N",
                       help="a request whose pictures take more tokens together is refused. Default: --max-model-len. "
                       "Their number is limited by --limit-mm-per-prompt image=N; default: any that fit")
    group.add_argument("--max-picture-source-pixels", type=int, default=64 << 20, metavar="N",
                       help="a picture that is larger as it was sent is refused, by its header (default 67108864); "
                       "decoding takes up to 16 bytes per pixel, for two pictures at a time")
    group.add_argument("--max-picture-bytes", type=int, default=64 << 20, metavar="N",
                       help="a picture whose file is larger is refused (default 67108864)")
    group.add_argument("--allow-remote-images", action="store_true",
                       help="fetch pictures from http and https addresses of the public internet, each within 10 s. "
                       "Default: only data URLs are taken")
    group.add_argument("--enable-reset-prefix-cache", action="store_true",
                       help="serve POST /reset_prefix_cache, which makes the engine forget every prefix that it "
                       "computed, for benchmarks")
    group.add_argument("--disable-web-page", action="store_true",
                       help="do not serve the page at /, a chat with this model for a browser. The page needs no key; "
                       "what it asks for does, where --api-key is given")
    group.add_argument("--engine-restarts", type=_at_least(0), default=5, metavar="N",
                       help="an engine process that is lost is started again, N times within --engine-restart-window "
                       "(default 5); then, and always with 0 or --disable-frontend-multiprocessing, the server ends")
    group.add_argument("--engine-restart-window", type=_at_least(1), default=3600, metavar="SECONDS",
                       help="see --engine-restarts (default 3600)")
    group.add_argument("--engine-restart-wait", type=_at_least(0), default=540, metavar="SECONDS",
                       help="how long a new request waits for an engine that is being started again, before it is told "
                       "to come back (503 with Retry-After). Default 540: OpenAI's clients give up after 600; 0: at "
                       "once")
    group.add_argument("--max-request-bytes", type=_at_least(1), default=128 << 20, metavar="N",
                       help="a request whose body is larger is refused with 413 (default 134217728)")
    group.add_argument("--max-queued-requests", type=_at_least(0), default=None, metavar="N",
                       help="a request is refused with 429 and Retry-After while --max-num-seqs others are under way "
                       "and N more wait. Default: any number waits")
    group.add_argument("--request-timeout", type=float, default=None, metavar="SECONDS",
                       help="a request that is not answered in full by then is ended, with 504 or, in a stream, an "
                       "error event. Default: none")
    group.add_argument("--log-prompts", action="store_true",
                       help="write the text of prompts into the log, up to --max-log-len characters of each. Default: "
                       "no text of any request is logged")
    group.add_argument("--shutdown-timeout", type=_at_least(0), default=30,
                       help="seconds that requests under way get to finish after SIGTERM (default 30)")
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def number(given: str) -> int:
        value = int(given)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return number


def validate_parsed_serve_args(args: argparse.Namespace) -> None:
    """Checks that need no model. Raises ValueError, TypeError or OSError."""
    _stock.validate_parsed_serve_args(args)


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
