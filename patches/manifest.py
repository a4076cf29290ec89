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
)

# worker/**, executor/**, attention/**, distributed/**
WORKER: tuple[Overlay, ...] = ()

# model_executor/**, transformers_utils/**, overlay/kernels/, overlay/model/, overlay/selftest.py
MODEL: tuple[Overlay, ...] = ()

# entrypoints/**, overlay/serving/
SERVING: tuple[Overlay, ...] = ()

OVERLAYS: tuple[Overlay, ...] = FOUNDATION + CORE + WORKER + MODEL + SERVING
