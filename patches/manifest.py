"""The one table of everything that this project changes in stock vLLM.

One row is one overlay: one change to one target. Only the engine reads this module; shell scripts, tests and documents ask the
engine. The source of a row (``vllm_overrides/<target>`` or ``patches/edits/<target>.patch``) and the marker line that its deployed
files end with are derived, so neither is ever typed. ``patches/README.md`` says how to add a row.
"""

# ruff: noqa: E501  (a cell of the table is one sentence on one line)
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
        id="pictures-computed-once",
        kind="addition",
        target="overlay/pictures/",
        reason="Stock maps and computes the pictures of a prompt anew for every piece of it, does not cut their positions to the piece, "
               "and leaves them out of the prefix cache's hash.",
        upstream="Not for upstream: vLLM V1 has an encoder cache of its own, which 0.6.3 cannot carry.",
        remove_when="the pin is a vLLM that serves Qwen3.5 with pictures and chunked prefill itself",
        requires=("overlay-package",),
        test="tests/overlay/pictures/test_book.py",
    ),
    Overlay(
        id="engine-substance",
        kind="addition",
        target="overlay/engine/",
        reason="What the engine does around a step: several samples of one prompt, seeds that survive preemption, a failed step, "
               "logits that are not finite.",
        upstream="Not for upstream: vLLM V1 does the same in its own engine.",
        remove_when="no engine or runner extension is left",
        requires=("overlay-package",),
        test="tests/overlay/engine/test_fanout.py",
    ),
    Overlay(
        id="prefix-cache-substance",
        kind="addition",
        target="overlay/prefix_cache/",
        reason="Which KV blocks may be reused: only those that a finished step has computed.",
        upstream="Not for upstream: vLLM V1 replaced the block manager.",
        remove_when="no extension under core/ is left",
        requires=("overlay-package",),
        test="tests/core/test_block_manager.py",
    ),
    Overlay(
        id="heap-evictor",
        kind="extension",
        target="core/evictor_v2.py",
        symbols=("Evictor", "EvictionPolicy", "make_evictor"),
        reason="Stock scans all blocks of the oldest time stamp for every block it evicts: 12 s for 16 K blocks.",
        upstream="https://github.com/vllm-project/vllm/pull/7209",
        remove_when="the pin's LRUEvictor evicts 16 K blocks of one time stamp in under 0.1 s",
        requires=("prefix-cache-substance",),
        test="tests/core/test_heap_evictor.py",
    ),
    Overlay(
        id="only-computed-blocks-are-cached",
        kind="extension",
        target="core/block/prefix_caching_block.py",
        symbols=("PrefixCachingBlockAllocator", "PrefixCachingBlockAllocator.promote_to_immutable_block",
                 "PrefixCachingBlockAllocator.mark_blocks_as_computed", "PrefixCachingBlockAllocator._free_block_id",
                 "PrefixCachingBlockAllocator._decr_refcount_cached_block", "PrefixCachingBlockAllocator._decr_refcount_hashless_block",
                 "PrefixCachingBlockAllocator.allocate_immutable_block", "PrefixCachingBlockAllocator._allocate_block_id",
                 "PrefixCachingBlock", "PrefixCachingBlock.hash_block_tokens"),
        reason="Stock enters blocks into the prefix cache before they are computed; an abort or a preemption in the middle of a prompt "
               "leaves garbage there that later requests attend to.",
        upstream="Not for upstream: vLLM V1 replaced the allocator.",
        remove_when="tests/core/test_prefix_law.py passes on the pin's own allocator",
        requires=("prefix-cache-substance",),
        test="tests/core/test_prefix_law.py",
    ),
    Overlay(
        id="block-objects-as-needed",
        kind="extension",
        target="core/block/common.py",
        symbols=("BlockPool", "BlockPool.__init__", "BlockPool.increase_pool", "BlockPool.init_block"),
        reason="Stock makes four Python objects for every block of the cache at start: 3 s and 100 MB for 64 K blocks.",
        upstream="Not for upstream: vLLM V1 replaced the allocator.",
        remove_when="the pin's block manager of 64 K blocks is made in under 0.5 s",
        requires=("overlay-package",),
        test="tests/core/test_block_manager.py::test_a_large_cache_is_made_at_once",
    ),
    Overlay(
        id="honest-prefix-hits",
        kind="extension",
        target="core/block_manager_v2.py",
        symbols=("BlockSpaceManagerV2", "BlockSpaceManagerV2.mark_blocks_as_computed", "BlockSpaceManagerV2.get_common_computed_block_ids",
                 "BlockSpaceManagerV2.can_allocate", "BlockSpaceManagerV2.can_append_slots", "BlockSpaceManagerV2.free",
                 "BlockSpaceManagerV2.allocate", "BlockSpaceManagerV2._allocate_sequence", "core/block/block_table.py:BlockTable.allocate"),
        reason="Stock counts hits over gaps, keeps a hit over later pieces of a prompt with too short a block table, wants a free block for "
               "a token that needs none, refuses a preempted sequence that fits, and takes two pictures of one size for equal content.",
        upstream="Not for upstream: vLLM V1 replaced the block manager.",
        remove_when="tests/core pass on the pin's own block manager",
        requires=("only-computed-blocks-are-cached",),
        test="tests/core/test_block_manager.py",
    ),
    Overlay(
        id="hits-and-state-slots-in-the-scheduler",
        kind="extension",
        target="core/scheduler.py",
        symbols=("Scheduler", "Scheduler.schedule", "Scheduler._get_num_new_tokens", "Scheduler._allocate_and_set_running",
                 "Scheduler._schedule_prefills", "Scheduler._preempt", "Scheduler.free_seq", "Scheduler.get_prefix_cache_hit_rate",
                 "Scheduler.abort_seq_group", "Scheduler._free_finished_seqs", "SchedulingBudget.remaining_token_budget",
                 "SchedulerPrefillOutputs.create_empty"),
        reason="The scheduler counts prefix hits, so that no piece of a prompt computes a cached token; owns the slots of recurrent state; "
               "preempts by recomputation only, because stock ends the engine when swap space runs out.",
        upstream="Not for upstream: vLLM V1 replaced the scheduler.",
        remove_when="the pin is a vLLM that serves Gated DeltaNet models with prefix caching itself",
        requires=("honest-prefix-hits", "recurrent-state-in-scheduler-owned-slots", "sequences-know-hits-and-orders"),
        test="tests/core/test_prefix_law.py",
    ),
    Overlay(
        id="sequences-know-hits-and-orders",
        kind="extension",
        target="sequence.py",
        symbols=("Sequence", "Sequence.get_output_token_ids_to_return", "SequenceGroup", "SequenceGroupMetadata"),
        reason="With no new token stock returns prompt and output as new tokens (2,485 completion tokens instead of 5); metadata refuses "
               "new attributes, so orders about states and pictures need a subclass.",
        upstream="https://github.com/vllm-project/vllm/issues/9028 (the token count)",
        remove_when="the pin returns no tokens where none are new, and recurrent-state-in-scheduler-owned-slots is removed",
        requires=("recurrent-state-in-scheduler-owned-slots", "pictures-computed-once"),
        test="tests/engine/test_outputs.py",
    ),
    Overlay(
        id="no-empty-outputs-and-cached-tokens",
        kind="extension",
        target="outputs.py",
        symbols=("RequestOutput", "RequestOutput.__init__", "RequestOutput.from_seq_group", "RequestOutputFactory.create"),
        reason="Stock streams an empty output for every piece of a prompt; outputs say how many tokens the prefix cache saved; samples of "
               "one request are joined here.",
        upstream="https://github.com/vllm-project/vllm/issues/9028 (it shows the empty outputs too)",
        remove_when="the pin sends nothing while a prompt is computed and has RequestOutput.num_cached_tokens",
        requires=("sequences-know-hits-and-orders", "rebind-one-stock-name-once", "engine-substance"),
        test="tests/engine/test_outputs.py",
    ),
    Overlay(
        id="several-greedy-samples",
        kind="extension",
        target="sampling_params.py",
        symbols=("SamplingParams", "SamplingParams._verify_greedy_sampling", "SamplingParams.from_optional", "SamplingParams.clone"),
        reason="The API allows n > 1 at temperature 0; stock refuses it because its n sequences share one group.",
        upstream="Not for upstream: vLLM V1 has the same limit by choice.",
        remove_when="the pin accepts n=2 with temperature=0",
        requires=("rebind-one-stock-name-once", "samples-as-requests-and-failed-steps"),
        test="tests/engine/test_fanout_engine.py",
    ),
    Overlay(
        id="samples-as-requests-and-failed-steps",
        kind="extension",
        target="engine/llm_engine.py",
        symbols=("LLMEngine", "LLMEngine.__init__", "LLMEngine._add_processed_request", "LLMEngine._create_sequence_group_with_sampling",
                 "LLMEngine.abort_request", "LLMEngine._process_model_outputs", "LLMEngine._advance_to_next_step",
                 "LLMEngine.has_unfinished_requests", "LLMEngine.step", "SchedulerContext",
                 "sequence.py:CompletionSequenceGroupOutput"),
        reason="n > max_num_seqs waits forever in stock and n > 1 cannot be preempted; an exception in a step ends stock's engine; the "
               "number of state slots must be known to scheduler and workers before either starts.",
        upstream="Not for upstream: vLLM V1 serves n as separate requests.",
        remove_when="the pin serves n=5 with max_num_seqs=2 and survives a step that raises",
        requires=("engine-substance", "no-empty-outputs-and-cached-tokens", "hits-and-state-slots-in-the-scheduler"),
        test="tests/engine/test_fanout_engine.py",
    ),
    Overlay(
        id="failed-steps-of-the-async-engine",
        kind="extension",
        target="engine/async_llm_engine.py",
        symbols=("_AsyncLLMEngine", "_AsyncLLMEngine.step_async", "AsyncLLMEngine", "AsyncLLMEngine.__init__", "AsyncLLMEngine.engine_step",
                 "RequestTracker.process_exception"),
        reason="An exception in a step ends stock's engine and with it every request; only those of that step need fail.",
        upstream="Not for upstream: vLLM V1 ends the engine too.",
        remove_when="the pin's AsyncLLMEngine answers after a step that raised",
        requires=("samples-as-requests-and-failed-steps",),
        test="tests/engine/test_step_failure.py",
    ),
    Overlay(
        id="failed-steps-of-the-engine-process",
        kind="extension",
        target="engine/multiprocessing/engine.py",
        symbols=("MQLLMEngine", "MQLLMEngine.__init__", "MQLLMEngine.engine_step", "MQLLMEngine._send_outputs", "run_mp_engine"),
        reason="The same for the engine in a process of its own; and what it cannot be started with is one line and exit status 1, not a "
               "stack trace.",
        upstream="Not for upstream: vLLM V1 ends the engine too.",
        remove_when="the pin's MQLLMEngine answers after a step that raised",
        requires=("samples-as-requests-and-failed-steps", "rebind-one-stock-name-once"),
        test="tests/engine/test_step_failure.py",
    ),
    Overlay(
        id="chunked-prefill-by-default",
        kind="extension",
        target="engine/arg_utils.py",
        symbols=("EngineArgs", "EngineArgs.create_model_config", "AsyncEngineArgs", "config.py:ModelConfig._init_multimodal_config"),
        reason="Stock cuts prompts into pieces by default only on CUDA above 32 K tokens; elsewhere it sizes a step for the whole context. "
               "It also sets 4 GiB per rank aside for swapping, which never happens here, and refuses --limit-mm-per-prompt for our models.",
        upstream="Not for upstream: vLLM V1 always cuts prompts.",
        remove_when="the pin cuts prompts on every device by default",
        requires=("engine-substance", "pictures-computed-once"),
        test="tests/engine/test_defaults.py",
    ),
    Overlay(
        id="float16-on-the-cpu",
        kind="extension",
        target="model_executor/custom_op.py",
        symbols=("CustomOp", "CustomOp.forward_cpu", "CustomOp.forward_native"),
        reason="Stock's compiled operators for the CPU refuse float16, and stock casts it to bfloat16 instead.",
        upstream="Later releases of vLLM compile them for float16 too.",
        remove_when="the pin's CPU build has rms_norm for Half",
        requires=("overlay-package",),
        test="tests/worker/test_one_code_path.py::test_half_precision_is_what_was_asked_for",
    ),
    Overlay(
        id="penalties-beside-prompt-logprobs",
        kind="extension",
        target="model_executor/sampling_metadata.py",
        symbols=("SamplingTensors", "SamplingTensors.from_sampling_metadata", "SamplingMetadata", "SequenceGroupToSample"),
        reason="Where only some requests of a batch want prompt logprobs, stock applies the penalties of one request to another.",
        upstream="Not found there; vLLM V1 replaced the sampler.",
        remove_when="test passes on the pin's own SamplingTensors",
        requires=("overlay-package",),
        test="tests/worker/test_one_code_path.py::test_penalties_beside_prompt_logprobs_and_pieces",
    ),
    Overlay(
        id="steps-without-a-token",
        kind="extension",
        target="model_executor/layers/logits_processor.py",
        symbols=("LogitsProcessor", "LogitsProcessor.forward", "_apply_logits_processors"),
        reason="In a step that only computes pieces of prompts no rank wants logits; the vendor's copy then fails on every rank but the "
               "first. And logits are watched here: stock draws a token from a row of NaN and streams it.",
        upstream="Not for upstream: the first fault is the vendor's; vLLM V1 only counts NaN in logits.",
        remove_when="the vendor's LogitsProcessor returns None on other ranks in such a step, and the pin fails a request of such logits",
        requires=("engine-substance", "rebind-one-stock-name-once"),
        test="tests/worker/test_nonfinite.py",
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
                 "attention/backends/utils.py:CommonMetadataBuilder", "attention/backends/utils.py:CommonAttentionState.graph_capture",
                 "attention/backends/abstract.py:AttentionBackend"),
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
        upstream="Later releases of vLLM do the same.",
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
        reason="Carries the scheduler's orders about recurrent state and pictures to every rank and to the model, with positions cut to the "
               "step; keeps the generator of a seeded request over a preemption; measures memory off CUDA, where stock returns an unbound name.",
        upstream="Not for upstream: vLLM V1 has its own design for the state of hybrid models, which 0.6.3 cannot carry.",
        remove_when="recurrent-state-in-scheduler-owned-slots is removed",
        requires=("recurrent-state-in-scheduler-owned-slots", "pictures-computed-once", "engine-substance", "rebind-one-stock-name-once",
                  "start-up-checks"),
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
        id="ranks-end-with-the-engine",
        kind="extension",
        target="executor/multiproc_gpu_executor.py",
        symbols=("MultiprocessingGPUExecutor", "MultiprocessingGPUExecutorAsync", "MultiprocessingGPUExecutor._init_executor",
                 "MultiprocessingGPUExecutor.shutdown", "executor/multiproc_worker_utils.py:WorkerMonitor",
                 "executor/multiproc_worker_utils.py:ProcessWorkerWrapper"),
        reason="With several ranks stock hangs at exit and after a failed start: it ends its processes by a queue, from a destructor. "
               "It also cannot be imported where Triton is not installed.",
        upstream="Not for upstream: vLLM V1 replaced the executor.",
        remove_when="a program that makes an engine of two ranks and returns from main ends by itself on the pin",
        requires=("start-up-checks",),
        test="tests/worker/test_two_ranks.py",
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
        requires=("gpu-worker-on-cpu", "ranks-end-with-the-engine"),
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
        symbols=("model_executor/layers/linear.py:ColumnParallelLinear.__init__",
                 "model_executor/layers/linear.py:MergedColumnParallelLinear.__init__",
                 "model_executor/layers/linear.py:QKVParallelLinear.__init__",
                 "model_executor/layers/linear.py:ReplicatedLinear.__init__",
                 "model_executor/layers/linear.py:RowParallelLinear.__init__",
                 "model_executor/layers/linear.py:LinearMethodBase.create_weights",
                 "model_executor/layers/linear.py:UnquantizedLinearMethod.create_weights",
                 "model_executor/layers/linear.py:MergedColumnParallelLinear.weight_loader",
                 "model_executor/layers/linear.py:QKVParallelLinear.weight_loader",
                 "model_executor/layers/quantization/base_config.py:QuantizationConfig",
                 "model_executor/layers/vocab_parallel_embedding.py:VocabParallelEmbedding.__init__",
                 "model_executor/layers/vocab_parallel_embedding.py:VocabParallelEmbedding._get_indices"),
        reason="Registration without a child process, a checkpoint loader that names what does not fit and reads a rank's part "
               "only, weights in int8, the model's sampling defaults, its vision tower and multi-token-prediction head.",
        upstream="Not for upstream: current vLLM has its own forms of each.",
        remove_when="hybrid-text-model is removed",
        requires=("overlay-package", "hybrid-model-configuration"),
        test="tests/models/test_checkpoint.py",
    ),
    Overlay(
        id="ranks-read-their-part-of-a-checkpoint",
        kind="extension",
        target="model_executor/model_loader/loader.py",
        symbols=("DefaultModelLoader", "DefaultModelLoader.__init__", "DefaultModelLoader._get_all_weights",
                 "DefaultModelLoader._prepare_weights", "DefaultModelLoader.load_model", "get_model_loader",
                 "model_executor/model_loader/__init__.py:get_model"),
        reason="Stock reads every tensor whole on every rank, 67 GB four times, and finds a damaged, missing or foreign shard "
               "only when it comes to it; a shard that its index names and that is not there it does not miss.",
        upstream="https://github.com/vllm-project/vllm (current loaders read whole tensors too)",
        remove_when="the pin's loader reads a rank's part only and checks headers first",
        requires=("hybrid-model-substance",),
        test="tests/models/test_loading.py",
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
    Overlay(
        id="operators-of-hybrid-models",
        kind="addition",
        target="overlay/kernels/",
        reason="Stock has no gated delta rule, no convolution that shifts its tail on a piece of one token, no Gemma norm with a "
               "gate, and its experts, attention and M-RoPE do not run on every device of ours; every operator has a reference.",
        upstream="Not for upstream: current vLLM has these as Triton and CUDA kernels, which neither pin can run.",
        remove_when="the pin's own operators serve the model on the card and on the CPU",
        requires=("overlay-package",),
        test="tests/overlay/kernels/test_gated_delta_rule.py",
    ),
    Overlay(
        id="self-test-of-the-operators",
        kind="addition",
        target="overlay/selftest.py",
        reason="A card can compute wrongly while its monitor looks fine: every back end is compared with its reference on the "
               "machine at hand.",
        upstream="Not for upstream: it tests this project's operators.",
        remove_when="operators-of-hybrid-models is removed",
        requires=("operators-of-hybrid-models",),
        test="tests/overlay/kernels/test_selftest.py",
    ),
    Overlay(
        id="sampling-without-sorting-the-vocabulary",
        kind="extension",
        target="model_executor/layers/sampler.py",
        symbols=("_apply_top_k_top_p", "_apply_min_p", "_multinomial", "Sampler", "Sampler.forward"),
        reason="Stock sorts all 248,320 logits of every row for top_k 20: 26 ms a row on one core against 1.2 ms. Which of "
               "several equal logits top-p drops is left to an unstable sort. And beside an unfinished prompt a seeded "
               "request draws from another request's generator, and temperature, top_p and penalties are rounded to the "
               "logits' dtype: in bfloat16 a top_p of 0.95 is 0.9492.",
        upstream="https://github.com/vllm-project/vllm (0.6.3's sampler is gone there; V1's selects by topk where only top-k is set)",
        remove_when="the pin's sampler selects candidates where top-k is small and works in float32",
        requires=("operators-of-hybrid-models", "rebind-one-stock-name-once"),
        test="tests/overlay/kernels/test_sampler_extension.py",
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
        symbols=("build_app", "run_server", "lifespan", "mount_metrics"),
        reason="The file that `python -m` runs: routes, start and end are vllm.overlay.serving's.",
        upstream="Not for upstream: it leads to this project's own package.",
        remove_when="openai-api-for-agents is removed",
        requires=("openai-api-for-agents", "options-of-our-server"),
        test="tests/entrypoints/test_server.py",
    ),
    Overlay(
        id="answers-for-every-caller-of-chat",
        kind="extension",
        target="entrypoints/openai/serving_chat.py",
        symbols=("OpenAIServingChat", "OpenAIServingChat.__init__", "OpenAIServingChat.create_chat_completion",
                 "entrypoints/openai/serving_engine.py:OpenAIServing.__init__",
                 "entrypoints/openai/serving_engine.py:OpenAIServing.create_error_response",
                 "entrypoints/openai/serving_engine.py:BaseModelPath",
                 "engine/async_llm_engine.py:AsyncLLMEngine.get_tokenizer",
                 "engine/async_llm_engine.py:AsyncLLMEngine.get_scheduler_config",
                 "entrypoints/openai/run_batch.py:main", "entrypoints/openai/run_batch.py:run_request"),
        reason="Whoever uses stock's chat handler, such as `run_batch`, must get the answers that the server gives.",
        upstream="Not for upstream: it leads to this project's own package.",
        remove_when="openai-api-for-agents is removed",
        requires=("openai-api-for-agents", "requests-and-answers-as-they-are"),
        test="tests/entrypoints/test_serving_chat.py",
    ),
    Overlay(
        id="requests-and-answers-as-they-are",
        kind="extension",
        target="entrypoints/openai/protocol.py",
        symbols=("OpenAIBaseModel", "ChatCompletionRequest", "UsageInfo", "ChatMessage", "ChatCompletionResponseChoice",
                 "ChatCompletionResponse", "DeltaFunctionCall", "DeltaToolCall", "DeltaMessage",
                 "ChatCompletionResponseStreamChoice", "ChatCompletionStreamResponse", "BatchRequestInput", "BatchResponseData", "BatchRequestOutput",
                 "ErrorResponse", "EmbeddingRequest", "EmbeddingResponse"),
        reason="One line that stock's request class refuses ends a whole batch, and its response classes drop thoughts and "
        "cached tokens without a word.",
        upstream="https://github.com/vllm-project/vllm/pull/10463 (unknown fields are ignored) and "
        "https://github.com/vllm-project/vllm/pull/12473 (reasoning_content)",
        remove_when="the pin's classes keep all that vllm.overlay.serving.chat emits, and take what its normalise takes",
        requires=("overlay-package",),
        test="tests/entrypoints/test_protocol.py",
    ),
    Overlay(
        id="bias-for-added-tokens",
        kind="extension",
        target="entrypoints/openai/logits_processors.py",
        symbols=("get_logits_processors",),
        reason="Stock refuses logit_bias and allowed_token_ids for added tokens such as </think>: it counts the vocabulary without them.",
        upstream="vLLM's current engine checks against the model's vocabulary; there is nothing to backport by itself.",
        remove_when="stock's get_logits_processors no longer asks for tokenizer.vocab_size",
        test="tests/entrypoints/test_logits_processors.py",
    ),
    Overlay(
        id="options-of-our-server",
        kind="extension",
        target="entrypoints/openai/cli_args.py",
        symbols=("make_arg_parser", "validate_parsed_serve_args"),
        reason="Stock has no --reasoning-parser and no --generation-config.",
        upstream="https://github.com/vllm-project/vllm/pull/12473 (--reasoning-parser) and "
        "https://github.com/vllm-project/vllm/pull/12622 (--generation-config)",
        remove_when="the pin's parser has both options",
        requires=("overlay-package",),
        test="tests/entrypoints/test_cli_args.py",
    ),
)

OVERLAYS: tuple[Overlay, ...] = FOUNDATION + CORE + WORKER + MODEL + SERVING
