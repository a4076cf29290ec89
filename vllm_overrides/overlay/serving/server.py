"""The server's life: check, bind, say what runs, start the engine, prove that it produces a token, listen, drain, end.

Whatever prevents a start is one line on stderr and exit code 1.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import functools
import json
import os
import signal
import socket
import sys
from argparse import Namespace
from typing import Any, NoReturn

import uvicorn

from vllm.logger import init_logger
from vllm.overlay.kernels.backend import choose_all
from vllm.overlay.model import generation_defaults
from vllm.overlay.runtime.announced import announced
from vllm.overlay.runtime.phases import Phases, process_began
from vllm.overlay.serving import engine_client
from vllm.overlay.serving.app import build_app, init_app_state
from vllm.overlay.serving.boundaries import wants_boundaries
from vllm.overlay.serving.errors import SERVER_ERROR, RequestError, StartError, one_line
from vllm.overlay.serving.fastpath import FastPath
from vllm.overlay.serving.parse import REASONING_PARSERS, TOOL_CALL_PARSERS, missing_tokens
from vllm.overlay.serving.pictures.settings import PictureLimits, picture_input
from vllm.overlay.serving.restarts import RestartPolicy
from vllm.overlay.serving.service import Service, Settings

logger = init_logger(__name__)

# Stock's 5 s are just when a client that pauses for 5 s sends its next request, over a connection that is being closed.
_KEEP_ALIVE_S = 300
# How long a server waits for error answers to be sent, whose engine is gone or whose time is up.
_FAREWELL_S = 2


def main() -> None:
    """``python -m vllm.entrypoints.openai.api_server``."""
    import uvloop

    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.overlay.runtime.platform_cpu import one_arena
    from vllm.utils import FlexibleArgumentParser, is_cpu

    if is_cpu():
        one_arena()
    parser = make_arg_parser(FlexibleArgumentParser(description="vLLM OpenAI-compatible RESTful API server."))
    # argparse's own puts a hundred lines of usage before the one that says what is wrong.
    parser.error = give_up
    args = parser.parse_args()
    try:
        validate_parsed_serve_args(args)
    except (ValueError, TypeError, OSError) as error:
        give_up(one_line(error))
    # The check of the tree imports every module that we changed, prometheus_client among what they import.
    alone = args.disable_frontend_multiprocessing
    with contextlib.nullcontext() if alone else engine_client.metrics_folder():
        uvloop.run(run_server(args))


async def run_server(args: Namespace, **uvicorn_options: Any) -> None:
    """Serve until SIGTERM or SIGINT. Raises SystemExit(1), after one line on stderr, when that is not possible any
    more."""
    from vllm.overlay.runtime.startup_check import check_deployed

    phases = Phases(process_began())
    phases.end("imports")
    deployed = check_deployed()
    main_task = asyncio.current_task()
    assert main_task is not None
    loop = asyncio.get_running_loop()
    told = False

    def end() -> None:
        # Once: a second time it would interrupt the engine's end, which has a limit of its own.
        nonlocal told
        if not told:
            main_task.cancel()
        told = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    try:
        check_args(args)
        with contextlib.closing(bind(args.host, args.port)) as sock:
            await _serve(args, sock, uvicorn_options, deployed, phases)
    except StartError as error:
        give_up(str(error))
    except asyncio.CancelledError:
        logger.info("told to end before it was ready")
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def give_up(why: str) -> NoReturn:
    """Ends the program: one line on stderr, exit code 1."""
    sys.stdout.flush()
    print(f"vllm: error: {why}", file=sys.stderr, flush=True)
    raise SystemExit(1) from None


def check_args(args: Namespace) -> None:
    """Raise StartError for options that contradict each other or name what this server does not have."""
    for option, value, known in (("--reasoning-parser", args.reasoning_parser, REASONING_PARSERS),
                                 ("--tool-call-parser", args.tool_call_parser, TOOL_CALL_PARSERS)):
        if value and value not in known:
            raise StartError(f"{option} {value} is not known; choose from {', '.join(sorted(known))}")
    if args.enable_auto_tool_choice and not args.tool_call_parser:
        raise StartError("--enable-auto-tool-choice needs --tool-call-parser")
    if args.lora_modules or args.prompt_adapters:
        raise StartError("--lora-modules and --prompt-adapters are not served here")
    if not os.path.exists(args.model) and os.path.isabs(args.model):
        raise StartError(f"there is no checkpoint at {args.model}")


def bind(host: str | None, port: int) -> socket.socket:
    """A bound socket that does not listen yet: clients are refused, not kept waiting, until the server is ready.

    Raises StartError where the address cannot be had; that is known before the model is loaded.
    """
    address = host or "0.0.0.0"
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((address, port))
    except OSError as error:
        sock.close()
        why = f"cannot listen on {address} port {port}: {error.strerror or error}; choose another with --port"
        raise StartError(why) from error
    return sock


def back_ends(config: Any) -> dict[str, str]:
    """Operator -> back end of a server with this engine configuration, the attention's first.

    Raises StartError for one that the environment asks for and that does not exist or cannot run.
    """
    from vllm.overlay.attention.choice import backend_of

    try:
        attention = backend_of(config.model_config, config.cache_config).get_name()
        return {"attention": attention, **choose_all()}
    except (ValueError, RuntimeError, ImportError) as error:
        raise StartError(one_line(error)) from error


def start_line(deployed: str, choices: dict[str, str]) -> str:
    """What runs here, for the log and whoever reads it later."""
    return f"vllm overlay: {deployed}; back ends: " + ", ".join(f"{what} {name}" for what, name in choices.items())


async def _serve(args: Namespace, sock: socket.socket, uvicorn_options: dict[str, Any], deployed: str,
                 phases: Phases) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.multiprocessing.client import MQLLMEngineClient

    engine_args = AsyncEngineArgs.from_cli_args(args)
    loop = asyncio.get_running_loop()
    try:
        config = await loop.run_in_executor(None, engine_args.create_engine_config)
        tokenizer = await loop.run_in_executor(None, load_tokenizer, config.model_config)
        requests = settings(args, config)
        if requests.pictures is not None:
            # The memory plan reserves what the largest picture takes.
            config.model_config.picture_pixels = requests.pictures.max_pixels
    except Exception as error:
        raise StartError(f"cannot serve {args.model}: {one_line(error)}") from error
    lacking = missing_tokens(tokenizer.get_vocab(), args.reasoning_parser, args.tool_call_parser)
    if lacking:
        raise StartError(f"the tokenizer of {args.model} has no token {', '.join(lacking)}, which --reasoning-parser "
                         "or --tool-call-parser needs")
    choices = back_ends(config)
    print(start_line(deployed, choices), flush=True)
    phases.end("configuration")
    alone = args.disable_frontend_multiprocessing or MQLLMEngineClient.is_unsupported_config(engine_args)
    start = engine_client.in_process if alone else functools.partial(
        engine_client.in_own_process, policy=RestartPolicy(args.engine_restarts, args.engine_restart_window,
                                                           args.engine_restart_wait))
    with announced(choices):
        async with start(engine_args, config) as engine:
            phases.end("engine")
            service = Service(engine.client, tokenizer, requests)
            await _while_alive(engine, warm_up(service))
            engine.settle()
            phases.end("first token")
            logger.info("Started in %s", phases.line())
            await _listen(args, sock, engine, service, config.model_config, uvicorn_options)


def settings(args: Namespace, config: Any) -> Settings:
    """What the command line and the engine's configuration say about requests."""
    model = config.model_config
    return Settings(
        model_names=tuple(args.served_model_name or [args.model]),
        model_path=args.model,
        max_model_len=model.max_model_len,
        max_logprobs=model.max_logprobs,
        reasoning_parser=args.reasoning_parser,
        tool_call_parser=args.tool_call_parser,
        auto_tools=args.enable_auto_tool_choice,
        reasoning_field=args.reasoning_field,
        response_role=args.response_role,
        chat_template=read_template(args.chat_template),
        trust_request_template=args.trust_request_chat_template,
        template_kwargs=template_kwargs(args.default_chat_template_kwargs),
        sampling_defaults=sampling_defaults(args.generation_config, model),
        tokens_as_ids=args.return_tokens_as_token_ids,
        log_requests=not args.disable_log_requests,
        log_prompts=(args.max_log_len or sys.maxsize) if args.log_prompts else 0,
        priorities=config.scheduler_config.policy == "priority",
        pictures=picture_input(model, PictureLimits.of(args)),
        boundaries=wants_boundaries(model, config.cache_config),
        fastpath=FastPath.of(),
    )


def read_template(source: str | None) -> str | None:
    """The chat template that --chat-template names: a file, or Jinja source on one line with its escapes."""
    if source is None or not os.path.isfile(source):
        return None if source is None else codecs.decode(source, "unicode_escape")
    with open(source, encoding="utf-8") as file:
        return file.read()


def template_kwargs(given: str | None) -> dict[str, Any]:
    """What --default-chat-template-kwargs says. Raises StartError where it is no JSON object."""
    try:
        read = json.loads(given) if given else {}
    except ValueError:
        read = None
    if not isinstance(read, dict):
        raise StartError(f"--default-chat-template-kwargs must be a JSON object, got {given!r:.80}")
    return read


def sampling_defaults(source: str, model_config: Any) -> dict[str, Any]:
    """The model's own sampling defaults; source is --generation-config."""
    if source == "vllm":
        return {}
    return generation_defaults.get_default_sampling_params(model_config if source == "auto" else source)


def load_tokenizer(model_config: Any) -> Any:
    """The tokenizer of the model that is to be served. Raises FileNotFoundError where its folder has none."""
    from vllm.transformers_utils.tokenizer import get_tokenizer

    try:
        return get_tokenizer(model_config.tokenizer, tokenizer_mode=model_config.tokenizer_mode,
                             trust_remote_code=model_config.trust_remote_code, revision=model_config.tokenizer_revision)
    except Exception as error:
        # transformers speaks of the argument that it then passes on as None.
        if os.path.isdir(model_config.tokenizer) and not _has_tokenizer(model_config.tokenizer):
            raise FileNotFoundError(f"there is no tokenizer in {model_config.tokenizer}: tokenizer.json is missing "
                                    "(or else vocab.json and merges.txt); copy it there, or name another folder with "
                                    "--tokenizer") from error
        raise


def _has_tokenizer(folder: str) -> bool:
    files = set(os.listdir(folder))
    return bool(files & {"tokenizer.json", "tokenizer.model", "vocab.txt", "tekken.json"}) or (
        {"vocab.json", "merges.txt"} <= files)


async def warm_up(service: Service) -> None:
    """Generate one token, so that "ready" means that a token can be produced. Raises StartError where it cannot."""
    from vllm.overlay.serving.chat import chat_answer
    from vllm.overlay.serving.completions import completion_answer

    request: dict[str, Any] = {"model": service.settings.model_names[0], "max_tokens": 1, "temperature": 0}
    try:
        if service.renderer.has_template:
            answer: Any = await chat_answer(service, {**request, "messages": [{"role": "user", "content": "Hello"}]})
        else:
            answer = await completion_answer(service, {**request, "prompt": "Hello"})
        await answer.whole()
    except Exception as error:
        logger.exception("the first token could not be produced")
        raise StartError(f"the first token could not be produced: {one_line(error)}") from error
    try:
        # Both processes read the vocabulary for their grammars, which takes seconds.
        answer = await completion_answer(service, {**request, "prompt": "Hello",
                                                   "response_format": {"type": "json_object"}})
        await answer.whole()
        await service.constrainer.get_ready()
    except RequestError as error:
        logger.warning("Structured output is refused: %s", error)


async def _while_alive(engine: engine_client.Engine, work: Any) -> Any:
    """The result of ``work``; StartError when the engine ends before."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, engine.failed}, return_when=asyncio.FIRST_COMPLETED)
        if engine.failed.done():
            raise StartError(engine.failed.result())
        return await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class _Server(uvicorn.Server):
    """Says that it is ready when it listens. Leaves signals to us: uvicorn would raise them again after its end, and
    the engine's clean-up would be skipped."""

    ready_lines = ""

    def __init__(self, config: uvicorn.Config) -> None:
        """In the event loop that it will run in."""
        super().__init__(config)
        self._told = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        """Accept nothing more; finish what is under way."""
        self.should_exit = True
        if not self._told.done():
            self._told.set_result(None)

    async def main_loop(self) -> None:
        """Until told to end. Looks once per second, as often as the date of the answers changes; uvicorn's ten times
        are most of what an idle server, or one that waits for a long prompt, uses."""
        while not await self.on_tick(0):
            await asyncio.wait({self._told}, timeout=1)

    def install_signal_handlers(self) -> None:
        """uvicorn before 0.29."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        """uvicorn since 0.29."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets=sockets)
        print(self.ready_lines, flush=True)


async def _listen(args: Namespace, sock: socket.socket, engine: engine_client.Engine, service: Service,
                  model_config: Any, uvicorn_options: dict[str, Any]) -> None:
    """Answer requests until told to end; then let those that are under way finish, for a while."""
    app = build_app(args)
    init_app_state(app.state, service, model_config, log_stats=not args.disable_log_stats, failed=engine.failed)
    server = _Server(uvicorn.Config(
        app, host=args.host or "0.0.0.0", port=args.port, log_level=args.uvicorn_log_level, access_log=False,
        timeout_keep_alive=_KEEP_ALIVE_S, ssl_keyfile=args.ssl_keyfile, ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs, ssl_cert_reqs=args.ssl_cert_reqs,
        timeout_graceful_shutdown=args.shutdown_timeout + _FAREWELL_S,
        **uvicorn_options))
    server.ready_lines = ready_lines(args, service)
    loop = asyncio.get_running_loop()

    def end() -> None:
        if server.should_exit:
            engine_client.dismiss(engine.client, _ending("at once, without finishing what is under way."))
            # Who cannot be told is dropped.
            loop.call_later(_FAREWELL_S, setattr, server, "force_exit", True)
            return
        server.end()
        left = args.shutdown_timeout
        if under_way := len(server.server_state.tasks):
            logger.info("told to end: %d under way, which may take %d s more (--shutdown-timeout); told once more, it "
                        "ends them at once", under_way, left)
        late = _ending(f"now: the request was not finished within the {left} s that were left (--shutdown-timeout).")
        loop.call_later(left, engine_client.dismiss, engine.client, late)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    try:
        await asyncio.wait({serving, engine.failed}, return_when=asyncio.FIRST_COMPLETED)
        if engine.failed.done():
            # Those who wait for the engine have been told; give them the time to hear it.
            server.config.timeout_graceful_shutdown = _FAREWELL_S
            server.end()
        await serving
    except OSError as error:
        raise StartError(f"cannot listen on port {args.port}: {error.strerror or error}") from error
    finally:
        service.close()
    if engine.failed.done():
        raise StartError(f"the engine is gone: {engine.failed.result()}")


def _ending(how: str) -> RequestError:
    return RequestError(f"The server ends {how}", status=503, kind=SERVER_ERROR, code="server_shutting_down")


def ready_lines(args: Namespace, service: Service) -> str:
    """What a person who started the server wants to know: that it is ready, and a command that works."""
    shown = "127.0.0.1" if args.host in (None, "", "0.0.0.0",
                                         "::") else f"[{args.host}]" if ":" in args.host else args.host
    base = f"{'https' if args.ssl_keyfile else 'http'}://{shown}:{args.port}{args.root_path or ''}"
    name = service.settings.model_names[0]
    body: dict[str, Any] = {"model": name, "max_tokens": 64}
    if service.renderer.has_template:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "Hello"}]
    else:
        path = "/v1/completions"
        body["prompt"] = "Hello"
    key = " -H 'Authorization: Bearer YOUR_KEY'" if args.api_key else ""
    insecure = " -k" if args.ssl_keyfile else ""
    # The page can only chat.
    page = "" if args.disable_web_page or not service.renderer.has_template else f"\nOr chat in a browser: {base}/"
    return (f"Ready: {name} at {base} (context {service.settings.max_model_len} tokens). Try:\n"
            f"curl{insecure} {base}{path} -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'{page}")
