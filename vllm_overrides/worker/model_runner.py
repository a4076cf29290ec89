"""The model runner of every device: stock's, which also carries orders about recurrent state and pictures to the
model."""
import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from vllm.model_executor.layers.sampler import SamplerOutput
from vllm.model_executor.sampling_metadata import SamplingMetadata
from vllm.overlay.engine import nonfinite
from vllm.overlay.engine.seeded import generators_in_use, put_back
from vllm.overlay.grammar import step as grammar_step
from vllm.overlay.hybrid import CheckpointError, StatePool, StateStep, StepOrders, set_state_step
from vllm.overlay.pictures.orders import PictureOrders
from vllm.overlay.pictures.picture_step import set_picture_step
from vllm.overlay.pictures.store import PictureStore
from vllm.overlay.rebind import rebind
from vllm.overlay.runtime.all_ranks import least
from vllm.overlay.runtime.platform_cpu import memory_profiler
from vllm.sequence import CompletionSequenceGroupOutput, IntermediateTensors, SequenceGroupMetadata
from vllm.worker import model_runner_stock as _stock

rebind(_stock, "DeviceMemoryProfiler", memory_profiler(_stock.DeviceMemoryProfiler))

# Stock's method without its decorators: one of them writes the prompts of a failed step to a file in /tmp, and raises
# another error than the one that happened.
_execute_model = inspect.unwrap(_stock.ModelRunner.execute_model)


@dataclasses.dataclass(frozen=True)
class ModelInputForGPUWithSamplingMetadata(_stock.ModelInputForGPUWithSamplingMetadata):
    """Stock's input of one step.

    state_orders: of its rows; None: the model has no recurrent state. picture_orders: None: nothing is to be done.
    """
    state_orders: StepOrders | None = None
    picture_orders: PictureOrders | None = None

    def as_broadcastable_tensor_dict(self) -> dict[str, Any]:
        tensors = {**super().as_broadcastable_tensor_dict(), "state_orders": self.state_orders}
        if self.picture_orders is not None:
            tensors["picture_orders"], tensors["picture_pixels"] = self.picture_orders.without_pixels()
        return tensors


class ModelRunner(_stock.ModelRunner):
    """Stock's runner.

    state_pool: set by the worker once the model is loaded. exchanging: whether other ranks may be waiting for this one,
    or it for them: from when a step's input is ready, to be sent to them, until its logits have come from them.
    """

    _model_input_cls = ModelInputForGPUWithSamplingMetadata
    state_pool: StatePool | None = None
    exchanging = False
    _profiling = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pictures = PictureStore()

    def make_model_input_from_broadcasted_tensor_dict(
            self, tensor_dict: dict[str, Any]) -> ModelInputForGPUWithSamplingMetadata:
        pixels = tensor_dict.pop("picture_pixels", None)
        if "picture_orders" in tensor_dict:
            tensor_dict["picture_orders"] = tensor_dict["picture_orders"].with_pixels(pixels)
        return ModelInputForGPUWithSamplingMetadata.from_broadcasted_tensor_dict(tensor_dict,
                                                                                 attn_backend=self.attn_backend)

    def prepare_model_input(
            self,
            seq_group_metadata_list: list[SequenceGroupMetadata],
            virtual_engine: int = 0,
            finished_requests_ids: list[str] | None = None) -> ModelInputForGPUWithSamplingMetadata:
        kept = generators_in_use(self.generators, seq_group_metadata_list)
        model_input = super().prepare_model_input(seq_group_metadata_list, virtual_engine, finished_requests_ids)
        put_back(kept, self.generators, seq_group_metadata_list, model_input.sampling_metadata)
        pictures = seq_group_metadata_list[0].step_pictures
        if pictures is not None:
            positions = model_input.input_positions
            if pictures.layouts:
                positions = pictures.positions(model_input.seq_lens, model_input.query_lens).to(positions.device)
            model_input = dataclasses.replace(model_input, input_positions=positions, picture_orders=pictures.orders)
        if self.state_pool is not None and not self._profiling:
            orders = [metadata.state_orders for metadata in seq_group_metadata_list]
            if any(order is None for order in orders):
                raise RuntimeError("a step of a model with recurrent state came without state orders")
            orders = StepOrders.collect(orders, model_input.query_lens, model_input.attn_metadata.num_prefills,
                                        seq_group_metadata_list[0].state_moves)
            model_input = dataclasses.replace(model_input, state_orders=orders)
        self.exchanging = True
        return model_input

    def profile_run(self) -> None:
        """Stock's run with dummy input; its rows own no state."""
        self._profiling = True
        try:
            super().profile_run()
        finally:
            self._profiling = False

    @torch.inference_mode()
    def execute_model(self,
                      model_input: ModelInputForGPUWithSamplingMetadata,
                      kv_caches: list[torch.Tensor],
                      intermediate_tensors: IntermediateTensors | None = None,
                      num_steps: int = 1) -> list[SamplerOutput] | IntermediateTensors | None:
        if (model_input.state_orders is None) != (self.state_pool is None or self._profiling):
            raise RuntimeError("scheduler and worker disagree about whether the model has recurrent state")
        step = None
        if model_input.state_orders is not None:
            try:
                step = StateStep.begin(self.state_pool, model_input.state_orders, self._on_all_ranks)
            except CheckpointError:
                # On every rank: the others wait for the next step, and the first says why there is none of this.
                self.exchanging = False
                if self.is_driver_worker:
                    raise
                return []
        orders, pictures = model_input.picture_orders, None
        try:
            if orders is not None:
                pictures = self.pictures.begin(orders, self.model)
            with set_state_step(step), set_picture_step(pictures):
                outputs = _execute_model(self, model_input, kv_caches, intermediate_tensors, num_steps)
        except Exception:
            self.exchanging = not nonfinite.is_watching(model_input.sampling_metadata)
            raise
        self.exchanging = False
        if step is not None:
            step.end()
        if orders is not None:
            self.pictures.end(orders)
        _one_output_per_group(outputs, model_input.sampling_metadata)
        nonfinite.mark(outputs, model_input.sampling_metadata, step)
        grammar_step.mark(outputs, model_input.sampling_metadata)
        return outputs

    def _on_all_ranks(self, here: Sequence[bool]) -> list[bool]:
        return [bool(value) for value in least(here, self.parallel_config.world_size)]


def _one_output_per_group(outputs: Any, sampling_metadata: SamplingMetadata | None) -> None:
    """Completes the output of a step in which no group wanted a token: stock returns one entry, however many groups."""
    if (isinstance(outputs, list) and sampling_metadata is not None and sampling_metadata.seq_groups is not None
            and not sampling_metadata.skip_sampler_cpu_output):
        for output in outputs:
            missing = len(sampling_metadata.seq_groups) - len(output.outputs)
            output.outputs.extend(CompletionSequenceGroupOutput([], None) for _ in range(missing))


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
