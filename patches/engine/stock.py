"""The installed tree as it is, and as stock had it: an original that we moved aside is found at its new place."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path

from patches.engine import files, markers
from patches.engine.digests import Digests, digest_source
from patches.engine.files import Content
from patches.engine.layout import RECEIPT, files_below, kept_path


class Tree:
    """One folder ``vllm``, read at most once per file."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._contents: dict[str, Content | None] = {}
        self._digests: dict[str, Digests | None] = {}

    def read(self, path: str) -> Content | None:
        """What lies at path now. Raises OSError for a link or a folder."""
        if path not in self._contents:
            self._contents[path] = files.read(self.root / path)
        return self._contents[path]

    def marker(self, path: str) -> str | None:
        """The id of the row that the file at path carries, None for a stock or a missing file."""
        content = self.read(path)
        return markers.marker_of(content.data) if content else None

    def original(self, path: str) -> Content | None:
        """Stock's own file of that path, wherever it lies now; None when stock has none, or when it is lost."""
        return self.read(kept_path(path) if self.marker(path) else path)

    def digests(self, path: str) -> Digests | None:
        """Digests of the original; None when there is none or it is no Python."""
        if path not in self._digests:
            content = self.original(path)
            try:
                self._digests[path] = digest_source(content.data) if content else None
            except (SyntaxError, ValueError):
                self._digests[path] = None
        return self._digests[path]

    @cached_property
    def kept(self) -> dict[str, str]:
        """Path that ours took -> SHA-256 of the original moved aside, by the receipt; empty without a sound one."""
        content = self.read(RECEIPT)
        try:
            overlays = json.loads(content.data)["overlays"] if content else []
            entries = [entry for overlay in overlays for entry in overlay["files"]]
            return {entry["path"]: entry["kept_sha256"] for entry in entries if entry["kept"]}
        except (ValueError, LookupError, TypeError):
            return {}  # apply writes it anew; what matters is decided by the files

    @cached_property
    def left_behind(self) -> set[str]:
        """Originals that we moved aside and that lost their use, because vLLM was installed anew over ours."""
        found: set[str] = set()
        for path, digest in self.kept.items():
            content = self.read(kept_path(path))
            if self.marker(path) is None and content and hashlib.sha256(content.data).hexdigest() == digest:
                found.add(kept_path(path))
        return found

    @cached_property
    def marked(self) -> dict[str, str]:
        """Every file of the tree that carries a marker: path -> id of its row."""
        found: dict[str, str] = {}
        for name in files_below(self.root):
            plain = not (self.root / name).is_symlink() and markers.can_carry_marker(name)
            marker = markers.marker_of((self.root / name).read_bytes()) if plain else None
            if marker is not None:
                found[name] = marker
        return found
