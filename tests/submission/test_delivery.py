"""What reaches the image: .gitattributes, .dockerignore, and the guard at the top of patch_ops.sh."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.overlay_world import REPOSITORY
from tests.submission.conftest import with_crlf
from tests.submission.dockerfile import delivered, parse

NEEDED = (
    "patch_ops.sh",
    "chat_template_multi_system.jinja",
    "patches/__main__.py",
    "patches/manifest.py",
    "patches/pins.json",
    "vllm_overrides/overlay/__init__.py",
    "vllm_overrides/overlay/selftest.py",
    "computility-run.yaml",
    "Makefile",
    "requirements/setup.sh",
    "requirements/serve.sh",
    "requirements/serve.txt",
    "requirements/wheels/SHA256SUMS",
    "requirements/torch_without_cuda/TorchConfig.cmake",
    "worklogs/make_demo_checkpoint.py",
    "worklogs/make_tokenizer.py",
    "LICENSE",
    "tests/twin/checkpoint/config.json",
)
TOP_LEVEL = {
    "Dockerfile", "computility-run.yaml", ".dockerignore", ".gitattributes", "chat_template_multi_system.jinja",
    "patches", "vllm_overrides", "patch_ops.sh", "worklogs", "remote_results", "tests", "README.md", "Makefile",
    "pyproject.toml", "LICENSE", ".gitignore", ".ci", "Dockerfile.cpu", "requirements", "docs",
}
KEPT_OUT = (
    ".git/config",
    ".venv/bin/python",
    ".venv-reference/pyvenv.cfg",
    ".venv-torch21/pyvenv.cfg",
    ".cache/demo/config.json",
    ".hypothesis/x",
    ".mypy_cache/x",
    ".ruff_cache/x",
    ".pytest_cache/x",
    ".setup.lock",
    ".test-result",
    "tests/run.py",
    "tests/twin/train.py",
    "tests/submission/__pycache__/x.pyc",
    "patches/__pycache__/x.pyc",
    "vllm_overrides/overlay/kernels/moe/__pycache__/x.pyc",
    "patches/engine/x.pyc",
    "remote_results/x.json",
)


def test_what_is_delivered_and_what_is_not(tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / ".dockerignore", tmp_path)
    for name in (*NEEDED, *KEPT_OUT):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert delivered(tmp_path) == sorted((".dockerignore", *NEEDED))
    here = delivered(REPOSITORY)
    assert [name for name in NEEDED if name not in here] == []
    twin = [name for name in here if name.startswith("tests/twin/checkpoint/")]
    for names, most in ((twin, 25), (set(here) - set(twin), 10)):
        size = sum((REPOSITORY / name).stat().st_size for name in names)
        assert size < most << 20, f"{size} bytes are delivered; what is so large?"


def test_wildcards_of_dockerignore(tmp_path: Path) -> None:
    (tmp_path / ".dockerignore").write_text("# all but one\n/a*\n!a2/keep\n**/b?\nc/**/d\n.dockerignore\n")
    for name in ("a1", "a2/keep", "a2/drop", "x/a3", "x/b1", "x/b12", "b2/x", "c/d", "c/x/y/d", "c/z", "d"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert delivered(tmp_path) == ["a2/keep", "c/z", "d", "x/a3", "x/b12"]


def test_no_crlf_is_delivered() -> None:
    binary = tuple(line.split()[0].removeprefix("*") for line in
                   (REPOSITORY / ".gitattributes").read_text(encoding="utf-8").splitlines() if line.endswith(" binary"))
    text = [name for name in delivered(REPOSITORY) if not name.endswith(binary)]
    assert len(text) > 100
    found = [name for name in text if b"\r\n" in (REPOSITORY / name).read_bytes()]
    assert found == []


def test_every_file_has_its_line_endings_settled() -> None:
    """Text is LF on every machine, and no file is left to a guess that another machine could make differently."""
    if not (REPOSITORY / ".git").exists():
        pytest.skip("this is no git checkout")
    names = git("ls-files", "-z").split("\0")[:-1]
    found = git("check-attr", "-z", "text", "eol", "--stdin", text="\0".join(names)).split("\0")[:-1]
    attributes: dict[str, dict[str, str]] = {name: {} for name in names}
    for name, attribute, value in zip(found[::3], found[1::3], found[2::3], strict=True):
        attributes[name][attribute] = value
    unset = [name for name, value in attributes.items() if value["text"] != "unset" and value["eol"] != "lf"]
    assert unset == []
    guessed = {Path(name).suffix for name, value in attributes.items() if value["text"] == "auto"}
    assert guessed & {".sh", ".py", ".patch", ".jinja", ".yaml", ".json", ".md", ".cpp", ".cu"} == set()
    stored = [line for line in git("ls-files", "--eol").splitlines() if line.startswith(("i/crlf", "i/mixed"))]
    assert stored == []


def test_nothing_is_committed_that_stands_only_here() -> None:
    """The top level is fixed, and a link may point to where another machine has nothing."""
    if not (REPOSITORY / ".git").exists():
        pytest.skip("this is no git checkout")
    entries = [entry.split("\t") for entry in git("ls-files", "-s", "-z").split("\0")[:-1]]
    assert [name for what, name in entries if what.startswith("120000")] == [], "symbolic links"
    assert sorted({name.split("/")[0] for _, name in entries} - TOP_LEVEL) == []


def git(*command: str, text: str = "") -> str:
    return subprocess.run(
        ["git", "-c", "safe.directory=*", *command],
        cwd=REPOSITORY, input=text, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("folder", [".", "/"], ids=["in the clone", "elsewhere"])
def test_patch_ops_with_crlf_says_so(folder: str, tmp_path: Path) -> None:
    """bash takes the CR at the end of a line for a part of its last word; without the guard it complains for pages."""
    clone = tmp_path / "a clone"
    clone.mkdir()
    shutil.copy(REPOSITORY / "patch_ops.sh", clone)
    with_crlf(clone / "patch_ops.sh")
    script = "patch_ops.sh" if folder == "." else str(clone / "patch_ops.sh")
    for command in ([], ["verify"]):
        done = subprocess.run(["bash", script, *command], cwd=clone / folder, capture_output=True, text=True)
        expected = f"refused: {script} has CRLF line endings, so the whole checkout may have them: "
        assert (done.returncode, done.stdout) == (2, ""), done
        assert done.stderr.startswith(expected) and done.stderr.count("\n") == 1, done


@pytest.mark.parametrize(
    "says, expected",
    [
        ("#!/bin/sh\necho 'pyenv: python3: command not found' >&2; exit 127\n", "does not run (exit status 127)"),
        ("#!/bin/sh\nkill -9 $$\n", "does not run (exit status 137)"),
        (None, "does not run (exit status 127)"),
    ],
    ids=["a shim", "killed", "missing"],
)
def test_patch_ops_without_a_python(says: str | None, expected: str, tmp_path: Path) -> None:
    python = tmp_path / "python3"
    if says:
        python.write_text(says)
        python.chmod(0o755)
    done = subprocess.run(
        ["bash", str(REPOSITORY / "patch_ops.sh")],
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(python)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"refused: the interpreter {python} {expected}: install "), done


def test_old_interpreters_that_are_here() -> None:
    """Those of pyenv; test_imitated_image has one that only says that it is old."""
    old = sorted((Path.home() / ".pyenv/versions").glob("[23].[0-9].*/bin/python"))
    if not old:
        pytest.skip("pyenv has no Python older than 3.10 here")
    for python in old:
        done = subprocess.run(
            ["bash", str(REPOSITORY / "patch_ops.sh")],
            env={"PATH": "/usr/bin:/bin", "PYTHON": str(python)},
            capture_output=True,
            text=True,
        )
        version = ".".join(python.parts[-3].split(".")[:2])
        assert (done.returncode, done.stdout) == (2, ""), done
        assert done.stderr.count("\n") == 1 and f" is Python {version}, and 3.10 or newer is needed: " in done.stderr, (
            done
        )


def test_image_for_everybody() -> None:
    """Dockerfile.cpu: the Makefile's own steps, and an entry that is the server on all interfaces."""
    steps = parse((REPOSITORY / "Dockerfile.cpu").read_text())
    bases = [step.rest.split()[0] for step in steps if step.name == "FROM"]
    assert bases == ["python:3.11-slim-bookworm"] * 2
    targets = [step.words()[1:] for step in steps if step.name == "RUN" and step.words()[0] == "make"]
    assert targets == [["env", "overlay"]]
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in targets[0]:
        assert f"\n{target}:" in makefile, target
    environment = next(step.pairs() for step in steps if step.name == "ENV")
    assert environment == {"PYTHON": "/workspace/.venv/bin/python", "NAME": "llm", "HOST": "0.0.0.0", "PORT": "8000"}
    entry = next(step.words() for step in steps if step.name == "ENTRYPOINT")
    assert entry == ["bash", "requirements/serve.sh"] and (REPOSITORY / entry[1]).is_file()
    assert next(step.words() for step in steps if step.name == "CMD") == ["tests/twin/checkpoint"]
    health = next(step.rest for step in steps if step.name == "HEALTHCHECK")
    command = json.loads(health.partition("CMD ")[2])
    compile(command[2], "HEALTHCHECK", "exec")
    assert command[0] == environment["PYTHON"] and "/health" in command[2]


def test_the_wheel_is_the_locked_one() -> None:
    """One version for the image, for everybody on the CPU, and for the torch 2.1 environment; its license beside it."""
    folder = REPOSITORY / "requirements/wheels"
    sums = dict(reversed(line.split()) for line in (folder / "SHA256SUMS").read_text().splitlines())
    assert sums == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.whl")}
    for name, digest in sums.items():
        package, version, *tags = name.removesuffix(".whl").split("-")
        assert tags == ["cp39", "abi3", "manylinux_2_31_x86_64"], "the image has Python 3.10 and glibc 2.31"
        for lock in ("serve", "torch21"):
            assert f"{package}=={version}" in (folder.parent / f"{lock}.in").read_text(), lock
            locked = (folder.parent / f"{lock}.txt").read_text()
            entry = locked.partition(f"{package}=={version} ")[2].partition("==")[0]
            assert f"sha256:{digest}" in entry, lock
        assert "MIT License" in (folder / f"LICENSE-{package}").read_text()
        assert f"`{name}`" in (folder / "README.md").read_text()
