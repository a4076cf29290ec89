"""Which attention back end is chosen, on the CPU and, where the questions about the device are answered so, on a card;
what is refused."""
import json
from types import SimpleNamespace

import pytest
import torch

from tests.models.shapes import text
from vllm.attention import get_attn_backend, selector, selector_stock
from vllm.attention.backends.torch_sdpa import TorchSDPABackend
from vllm.attention.selector import _Backend
from vllm.overlay.attention.choice import backend_of, is_vendor_stack
from vllm.overlay.attention.paged_backend import PagedTorchBackend
from vllm.overlay.runtime.announced import announced

PLAIN = {"head_size": 256, "sliding_window": None, "dtype": torch.float16, "kv_cache_dtype": "auto", "block_size": 16,
         "is_attention_free": False}


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch):
    monkeypatch.delenv("VLLM_ATTENTION_BACKEND", raising=False)
    selector.get_attn_backend.cache_clear()
    yield
    selector.get_attn_backend.cache_clear()


@pytest.fixture
def card(monkeypatch):
    """A CUDA device of the capability that the vendor's platform claims."""
    monkeypatch.setattr(selector_stock, "is_cpu", lambda: False)
    platform = SimpleNamespace(is_tpu=lambda: False, has_device_capability=lambda capability: capability <= 90)
    monkeypatch.setattr(selector_stock, "current_platform", platform)


@pytest.fixture
def vendor(monkeypatch, tmp_path):
    """The vendor's operators are installed; importing them would load a device library."""
    (tmp_path / "path/ixformer").mkdir(parents=True)
    (tmp_path / "path/ixformer/__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path / "path")


def test_on_the_cpu(monkeypatch):
    assert TorchSDPABackend is PagedTorchBackend
    assert get_attn_backend(*PLAIN.values()) is PagedTorchBackend
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TORCH_SDPA")
    assert selector.which_attn_to_use(**PLAIN) == _Backend.TORCH_SDPA


def test_another_one_on_the_cpu_is_refused(monkeypatch):
    """Stock takes its CPU back end then, and says so in the log only."""
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "XFORMERS")
    assert selector_stock.which_attn_to_use(**PLAIN) == _Backend.TORCH_SDPA
    with pytest.raises(ValueError, match="VLLM_ATTENTION_BACKEND=XFORMERS: only TORCH_SDPA runs on the CPU"):
        selector.get_attn_backend(*PLAIN.values())


def test_a_name_that_does_not_exist(monkeypatch):
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "NOSUCH")
    with pytest.raises(ValueError, match="Invalid attention backend 'NOSUCH'"):
        selector.get_attn_backend(*PLAIN.values())


def test_ours_is_the_default_on_a_card(card, monkeypatch):
    assert selector.get_attn_backend(*PLAIN.values()) is PagedTorchBackend
    assert selector_stock.which_attn_to_use(**PLAIN) != _Backend.TORCH_SDPA
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TORCH_SDPA")
    with pytest.raises(AssertionError):
        selector_stock.get_attn_backend.__wrapped__(*PLAIN.values())


@pytest.mark.parametrize("asked", ["FLASH_ATTN", "XFORMERS", "FLASHINFER", "TORCH_SDPA"])
def test_what_is_asked_for_is_obeyed_on_a_card(card, monkeypatch, asked):
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", asked)
    question = {**PLAIN, "head_size": 64}
    chosen = selector.which_attn_to_use(**question)
    expected = asked if asked == "TORCH_SDPA" else selector_stock.which_attn_to_use(**question).name
    assert chosen.name == expected


def test_what_stock_forces_is_obeyed_on_a_card(card):
    """As its runner of encoder-decoder models does."""
    selector.global_force_attn_backend(_Backend.XFORMERS)
    try:
        assert selector.which_attn_to_use(**PLAIN) == _Backend.XFORMERS
    finally:
        selector.global_force_attn_backend(None)


@pytest.mark.parametrize("change", [{"sliding_window": 512}, {"kv_cache_dtype": "fp8"}])
def test_what_ours_cannot_do_is_stock_s_on_a_card(card, change):
    assert selector.which_attn_to_use(**{**PLAIN, **change}) == selector_stock.which_attn_to_use(**{**PLAIN, **change})
    assert selector.which_attn_to_use(**{**PLAIN, **change}) != _Backend.TORCH_SDPA


def test_no_attention_is_no_back_end(card):
    assert selector.which_attn_to_use(**{**PLAIN, "is_attention_free": True}) == _Backend.NO_ATTENTION


@pytest.mark.parametrize("question", ["is_openvino", "is_xpu", "is_hip"])
def test_other_devices_are_stock_s(card, monkeypatch, question):
    monkeypatch.setattr(selector_stock, question, lambda: True)
    monkeypatch.setattr(selector_stock, "which_attn_to_use", lambda *_: _Backend.PALLAS)
    assert selector.which_attn_to_use(**PLAIN) == _Backend.PALLAS


def test_the_workers_obey_the_server():
    with announced({"attention": "flash-attn"}), pytest.raises(
            RuntimeError, match="attention: the server announced back end flash-attn, but process .* torch-paged"):
        selector.get_attn_backend(*PLAIN.values())
    with announced({"attention": "torch-paged"}):
        assert selector.get_attn_backend(*PLAIN.values()) is PagedTorchBackend


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a configuration; one of ours, which stock does not start a process to inspect."""
    fields = {**text(48, 4, 2, (4, 1, 16), (2, 4, 16, 12), 4, 0.5, intermediate_size=24), "dtype": "float32",
              "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def engine_config(model, **arguments):
    from vllm import EngineArgs
    return EngineArgs(model=str(model), skip_tokenizer_init=True, dtype="float16", **arguments).create_engine_config()


def test_the_server_knows_what_the_workers_will_choose(model):
    config = engine_config(model)
    assert backend_of(config.model_config, config.cache_config).get_name() == "torch-paged"


def test_it_starts_on_the_vendor_s_stack_as_it_is_submitted(card, vendor, model):
    assert is_vendor_stack()
    config = engine_config(model, enable_chunked_prefill=True, enable_prefix_caching=True)
    assert config.scheduler_config.chunked_prefill_enabled and config.cache_config.enable_prefix_caching


@pytest.mark.parametrize("how", [{"enable_chunked_prefill": True}, {"enable_prefix_caching": True}, {}])
def test_a_start_that_would_hang_the_card_is_refused(card, vendor, model, monkeypatch, how):
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "XFORMERS")
    with pytest.raises(ValueError, match="XFORMERS .* hangs this card for good: leave VLLM_ATTENTION_BACKEND"):
        engine_config(model, **how)


def test_and_one_that_cannot_is_not(card, vendor, model, monkeypatch):
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "XFORMERS")
    assert not engine_config(model, enable_chunked_prefill=False).scheduler_config.chunked_prefill_enabled


def test_elsewhere_xformers_may_cut_prompts(card, model, monkeypatch):
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "XFORMERS")
    assert not is_vendor_stack()
    assert engine_config(model, enable_chunked_prefill=True).scheduler_config.chunked_prefill_enabled


def test_the_kernel_is_never_reached(vendor, monkeypatch):
    """Whoever gets past the other checks ends in an error, before the kernel is started."""
    from vllm.attention.ops import paged_attn, paged_attn_stock
    monkeypatch.setattr(paged_attn_stock, "context_attention_fwd", lambda *_: pytest.fail("the card hangs"),
                        raising=False)
    with pytest.raises(RuntimeError, match="hangs this card for good"):
        paged_attn.PagedAttention.forward_prefix(torch.zeros(1), *[None] * 14)


def test_elsewhere_the_kernel_is_stock_s(monkeypatch):
    from vllm.attention.ops import paged_attn, paged_attn_stock
    calls = []
    monkeypatch.setattr(paged_attn_stock, "context_attention_fwd", lambda *arguments: calls.append(arguments),
                        raising=False)
    paged_attn.PagedAttention.forward_prefix(torch.zeros(1), *[None] * 6, [0, 1], *[None] * 7)
    assert len(calls) == 1
