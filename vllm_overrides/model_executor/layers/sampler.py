"""Stock's sampler with the filters of `vllm.overlay.kernels.sampling`: no vocabulary is sorted where top-k is small."""
from vllm.model_executor.layers import sampler_stock as _stock
from vllm.overlay.kernels import sampling
from vllm.overlay.rebind import rebind

rebind(_stock, "_apply_top_k_top_p", sampling.apply_top_k_top_p)
rebind(_stock, "_apply_min_p", sampling.apply_min_p)


def __getattr__(name: str) -> object:
    return getattr(_stock, name)
