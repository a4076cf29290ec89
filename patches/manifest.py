"""The one table of everything that this project changes in stock vLLM.

One row is one overlay: one change to one target. Only the engine reads this module; shell scripts, tests and documents ask the
engine. The source of a row (``vllm_overrides/<target>`` or ``patches/edits/<target>.patch``) and the marker line that its deployed
files end with are derived, so neither is ever typed. ``patches/README.md`` says how to add a row.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Overlay:
    """One change to stock.

    id: kebab-case, what changes for the user. kind: ``addition``, ``extension``, ``edit`` or ``replacement``. target: a path under
    ``vllm/``; a trailing ``/`` means every file of that folder (additions only). symbols: the stock symbols that the row overrides or
    stands on, as ``Class.method``, ``Class`` or ``function`` of the target, or ``other/file.py:Symbol`` of another file. reason: why
    stock will not do. upstream: a link, or why there is none. remove_when: an event that somebody can check, or never and why.
    requires: ids of rows that must be there too. test: the test that fails without the row, ``tests/file.py`` or
    ``tests/file.py::name``. evidence: the ledger run, when the reason is speed.
    """

    id: str
    kind: str
    target: str
    reason: str
    upstream: str
    remove_when: str
    test: str
    symbols: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    evidence: str = ""


# What every other row needs: the package itself, rebinding, start-up checks.
FOUNDATION = (
    Overlay(
        id="overlay-package",
        kind="addition",
        target="overlay/__init__.py",
        reason="All substance of this project lives in one package of its own, vllm.overlay, so that seams stay thin.",
        upstream="Not for upstream: it is the name of this project's own package.",
        remove_when="never: it holds everything else",
        test="tests/patches/test_real_stock.py",
    ),
    Overlay(
        id="rebind-one-stock-name-once",
        kind="addition",
        target="overlay/rebind.py",
        reason="Functions inside stock keep calling stock helpers; replacing such a name must fail loudly when it is gone or was taken.",
        upstream="Not for upstream: only an overlay needs it.",
        remove_when="no extension calls vllm.overlay.rebind any more",
        requires=("overlay-package",),
        test="tests/overlay/test_rebind.py",
    ),
    Overlay(
        id="start-up-checks",
        kind="addition",
        target="overlay/runtime/",
        reason="A server must not start on a half-applied or changed tree, and must run on cpu and on the card through one shim.",
        upstream="Not for upstream: it checks this project's own receipt.",
        remove_when="never: it is the proof at start that the overlay is in use",
        requires=("overlay-package",),
        test="tests/overlay/runtime/test_startup_check.py",
    ),
)

# core/**, sequence.py, engine/**, config.py, utils.py, overlay/hybrid/
CORE: tuple[Overlay, ...] = (
    Overlay(
        id="recurrent-state-in-scheduler-owned-slots",
        kind="addition",
        target="overlay/hybrid/",
        reason="Stock keys recurrent state by request id inside the model, which breaks silently on prefix hits and on preemption.",
        upstream="Not for upstream: vLLM V1 has its own design for the state of hybrid models, which 0.6.3 cannot carry.",
        remove_when="the pin is a vLLM that serves Gated DeltaNet models with prefix caching itself",
        requires=("overlay-package",),
        test="tests/overlay/hybrid/test_state_pool.py",
    ),
    Overlay(
        id="engine-substance",
        kind="addition",
        target="overlay/engine/",
        reason="What the engine does around a step: several samples of one prompt, seeds that survive preemption, a failed step.",
        upstream="Not for upstream: vLLM V1 does the same in its own engine.",
        remove_when="no engine or runner extension is left",
        requires=("overlay-package",),
        test="tests/overlay/engine/test_fanout.py",
    ),
)

# worker/**, executor/**, attention/**, distributed/**
WORKER: tuple[Overlay, ...] = (
    Overlay(
        id="paged-torch-attention",
        kind="addition",
        target="overlay/attention/",
        reason="One attention back end for prompts, pieces of prompts and decode rows in one batch, any head size, on every device.",
        upstream="Not for upstream: vLLM V1 replaced the back ends that this one stands beside.",
        remove_when="the pin's CPU back end takes chunked prefill and prefix hits, and the card's native one does at head size 256",
        requires=("overlay-package",),
        test="tests/overlay/attention/test_paged_backend.py",
    ),
    Overlay(
        id="cpu-attention-with-context",
        kind="extension",
        target="attention/backends/torch_sdpa.py",
        symbols=("TorchSDPABackend", "TorchSDPABackendImpl", "TorchSDPAMetadata",
                 "attention/backends/utils.py:CommonMetadataBuilder", "attention/backends/abstract.py:AttentionBackend"),
        reason="Stock's CPU back end raises on a prompt with context and has no metadata builder for the GPU runner.",
        upstream="https://github.com/vllm-project/vllm/pull/10355 (chunked prefill on CPU, by another runner)",
        remove_when="the pin's TorchSDPABackend takes a prefill row with context",
        requires=("paged-torch-attention",),
        test="tests/overlay/attention/test_paged_backend.py",
    ),
    Overlay(
        id="torch-attention-on-a-card",
        kind="extension",
        target="attention/selector.py",
        symbols=("get_attn_backend", "which_attn_to_use", "_Backend"),
        reason="Stock allows VLLM_ATTENTION_BACKEND=TORCH_SDPA on the CPU only; on a card ours is the reference and the fallback.",
        upstream="Not for upstream: there TORCH_SDPA has no use on a card.",
        remove_when="the card's native attention is trusted at head size 256 and long context",
        requires=("cpu-attention-with-context",),
        test="tests/overlay/attention/test_paged_backend.py::test_selectable_on_a_card",
    ),
    Overlay(
        id="all-reduce-on-cpu-by-gloo",
        kind="extension",
        target="distributed/parallel_state.py",
        symbols=("GroupCoordinator", "GroupCoordinator._all_reduce_in_place", "init_model_parallel_group", "init_world_group"),
        reason="Stock sums CPU tensors by Intel's extension for PyTorch, which is not installed and not needed.",
        upstream="https://github.com/vllm-project/vllm/pull/11107",
        remove_when="the pin's GroupCoordinator sums CPU tensors by torch.distributed",
        requires=("rebind-one-stock-name-once",),
        test="tests/worker/test_two_ranks.py",
    ),
    Overlay(
        id="state-pool-of-the-worker",
        kind="extension",
        target="worker/worker.py",
        symbols=("Worker", "Worker.load_model", "Worker.determine_num_available_blocks", "Worker.execute_worker"),
        reason="Recurrent states need memory of their own, taken before the KV budget is measured.",
        upstream="Not for upstream: vLLM V1 has its own design for the state of hybrid models, which 0.6.3 cannot carry.",
        remove_when="recurrent-state-in-scheduler-owned-slots is removed",
        requires=("recurrent-state-in-scheduler-owned-slots",),
        test="tests/worker/test_state_plumbing.py",
    ),
    Overlay(
        id="state-orders-of-a-step",
        kind="extension",
        target="worker/model_runner.py",
        symbols=("ModelInputForGPUWithSamplingMetadata", "ModelRunner", "ModelRunner.execute_model", "ModelRunner.prepare_model_input",
                 "ModelRunner.make_model_input_from_broadcasted_tensor_dict", "GPUModelRunnerBase.profile_run",
                 "GPUModelRunnerBase.load_model", "utils.py:DeviceMemoryProfiler"),
        reason="Carries the scheduler's orders about recurrent state to every rank and to the model; keeps the generator of a seeded "
               "request over a preemption; measures memory off CUDA, where stock returns an unbound name.",
        upstream="Not for upstream: vLLM V1 has its own design for the state of hybrid models, which 0.6.3 cannot carry.",
        remove_when="recurrent-state-in-scheduler-owned-slots is removed",
        requires=("recurrent-state-in-scheduler-owned-slots", "engine-substance", "rebind-one-stock-name-once", "start-up-checks"),
        test="tests/worker/test_state_plumbing.py",
    ),
    Overlay(
        id="gpu-worker-on-cpu",
        kind="extension",
        target="worker/cpu_worker.py",
        symbols=("CPUWorker", "worker/worker.py:Worker", "distributed/parallel_state.py:init_distributed_environment",
                 "distributed/parallel_state.py:ensure_model_parallel_initialized"),
        reason="Stock has a second worker and runner for the CPU, without chunked prefill, prefix caching or mixed batches; ours is the "
               "one of the card with another device set-up and memory budget.",
        upstream="https://github.com/vllm-project/vllm/pull/10355 (brings the two nearer, by other means)",
        remove_when="the pin runs one worker on both devices",
        requires=("state-pool-of-the-worker", "state-orders-of-a-step", "cpu-attention-with-context"),
        test="tests/worker/test_one_code_path.py",
    ),
    Overlay(
        id="gpu-executor-on-cpu",
        kind="extension",
        target="executor/cpu_executor.py",
        symbols=("CPUExecutor", "CPUExecutorAsync", "executor/multiproc_gpu_executor.py:MultiprocessingGPUExecutor",
                 "executor/multiproc_gpu_executor.py:MultiprocessingGPUExecutorAsync",
                 "executor/gpu_executor.py:GPUExecutor._get_worker_module_and_class"),
        reason="Stock's CPU executor casts float16 to bfloat16 and switches chunked prefill and prefix caching off.",
        upstream="https://github.com/vllm-project/vllm/pull/10355",
        remove_when="the pin's CPU executor leaves dtype, chunked prefill and prefix caching as asked",
        requires=("gpu-worker-on-cpu", "start-up-checks"),
        test="tests/worker/test_one_code_path.py",
    ),
)

# model_executor/**, transformers_utils/**, overlay/kernels/, overlay/model/, overlay/selftest.py
MODEL: tuple[Overlay, ...] = (
    Overlay(
        id="hybrid-model-configuration",
        kind="addition",
        target="transformers_utils/configs/qwen3_5.py",
        reason="transformers 4.51 and 4.55 do not know the Qwen3.5 model types, and stock asks for torch_dtype and "
               "layers_block_type, which the published files do not have.",
        upstream="https://github.com/huggingface/transformers (qwen3_5, qwen3_5_moe: transformers 5 only)",
        remove_when="the pins' transformers has qwen3_5_moe and stock counts KV by its layer_types",
        requires=(),
        test="tests/models/test_config.py",
    ),
    Overlay(
        id="hybrid-model-substance",
        kind="addition",
        target="overlay/model/",
        reason="Registration without a child process, a checkpoint loader that names what does not fit, the model's "
               "sampling defaults.",
        upstream="Not for upstream: current vLLM has its own forms of each.",
        remove_when="hybrid-text-model is removed",
        requires=("overlay-package", "hybrid-model-configuration"),
        test="tests/models/test_checkpoint.py",
    ),
    Overlay(
        id="hybrid-text-model",
        kind="addition",
        target="model_executor/models/qwen3_5.py",
        symbols=("attention/layer.py:Attention.forward",
                 "model_executor/layers/linear.py:MergedColumnParallelLinear.weight_loader",
                 "model_executor/layers/linear.py:QKVParallelLinear.weight_loader",
                 "model_executor/layers/linear.py:RowParallelLinear.weight_loader"),
        reason="Stock has no Gated DeltaNet model.",
        upstream="https://github.com/vllm-project/vllm/blob/main/vllm/model_executor/models/qwen3_5.py (for vLLM V1 only)",
        remove_when="the pin is a vLLM with qwen3_5.py",
        requires=("hybrid-model-substance", "recurrent-state-in-scheduler-owned-slots"),
        test="tests/models/test_parity.py",
    ),
    Overlay(
        id="hybrid-models-registered",
        kind="edit",
        target="model_executor/models/__init__.py",
        symbols=("model_executor/models/registry.py:_LazyRegisteredModel", "model_executor/models/registry.py:_ModelInfo",
                 "model_executor/models/registry.py:_LazyRegisteredModel.inspect_model_cls"),
        reason="Stock's table of architectures is closed; plugins are no way in, because their failures are swallowed.",
        upstream="Not for upstream: there the model stands in the table.",
        remove_when="hybrid-text-model is removed",
        requires=("hybrid-text-model",),
        test="tests/models/test_registration.py",
    ),
)

# entrypoints/**, overlay/serving/
SERVING: tuple[Overlay, ...] = (
    Overlay(
        id="openai-api-for-agents",
        kind="addition",
        target="overlay/serving/",
        symbols=(
            "engine/multiprocessing/client.py:MQLLMEngineClient.generate",
            "engine/multiprocessing/client.py:MQLLMEngineClient.setup",
            "engine/multiprocessing/client.py:MQLLMEngineClient._process_request",
            "engine/multiprocessing/engine.py:MQLLMEngine.from_engine_args",
            "engine/multiprocessing/engine.py:MQLLMEngine.start",
            "sampling_params.py:SamplingParams",
        ),
        reason="Stock refuses unknown fields, knows no reasoning and no qwen3_coder calls, parses streamed and whole answers by "
        "different code, and says ready before a token can be produced.",
        upstream="Not for upstream as it is: current vLLM has the parts (reasoning and tool parsers) in another server.",
        remove_when="the pin is a vLLM whose own server passes tests/entrypoints and tests/overlay/serving",
        requires=("overlay-package", "start-up-checks"),
        test="tests/entrypoints/test_chat.py",
    ),
    Overlay(
        id="server-with-our-api",
        kind="extension",
        target="entrypoints/openai/api_server.py",
        symbols=("build_app", "run_server", "lifespan", "mount_metrics", "tokenize", "detokenize"),
        reason="The file that `python -m` runs: routes, start and end are vllm.overlay.serving's.",
        upstream="Not for upstream: it leads to this project's own package.",
        remove_when="openai-api-for-agents is removed",
        requires=("openai-api-for-agents", "options-of-our-server"),
        test="tests/entrypoints/test_server.py",
    ),
    Overlay(
        id="options-of-our-server",
        kind="extension",
        target="entrypoints/openai/cli_args.py",
        symbols=("make_arg_parser", "validate_parsed_serve_args"),
        reason="Stock has no --reasoning-parser and no --generation-config.",
        upstream="https://github.com/vllm-project/vllm/pull/11473 (--reasoning-parser) and "
        "https://github.com/vllm-project/vllm/pull/12622 (--generation-config)",
        remove_when="the pin's parser has both options",
        requires=("overlay-package",),
        test="tests/entrypoints/test_cli_args.py",
    ),
)

OVERLAYS: tuple[Overlay, ...] = FOUNDATION + CORE + WORKER + MODEL + SERVING
