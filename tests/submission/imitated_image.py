"""A scratch root that looks like the platform's base image, and the steps of a Dockerfile run in it.

A step sees the scratch root and nothing else: its own mount, process and network namespace, chroot, the host's programs
and libraries mounted read-only. There is a Python 3.10 whose site packages are pip alone, vLLM's tree at the vendor's
place, a dozen programs (no git, no curl, no compiler), and no network.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import zipfile
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path

from tests.submission.dockerfile import Instruction, delivered, parse

BASE = "harbor.4pd.io/modelhubxc/enginex-iluvatar/bi100-3.2.3-x86-ubuntu20.04-py3.10-poc-llm-infer:v1.2.3"
COREX = "usr/local/corex-3.2.3"
PACKAGES = "lib64/python3/dist-packages"
# As PLATFORM 8 has it: by way of the symbolic link.
ENVIRONMENT = {
    "PATH": "/opt/python/bin:/usr/local/bin:/usr/bin:/bin",
    "PYTHONPATH": f"/usr/local/corex/{PACKAGES}",
    "LD_LIBRARY_PATH": "/usr/local/corex/lib:/usr/local/corex/lib64",
    "HOME": "/root",
}
PROGRAMS = [
    "bash",
    "sh",
    "cat",
    "chmod",
    "cp",
    "dirname",
    "basename",
    "echo",
    "env",
    "find",
    "grep",
    "head",
    "ls",
    "mkdir",
    "mv",
    "rm",
    "sed",
    "sha256sum",
    "sort",
    "touch",
    "wc",
]
_LIBRARIES = ("lib", "lib64")
_HOST = "host/usr/bin"
# chroot lies where only root looks.
_HOST_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

# $1: the root, then triples of a folder of the host, its place in the root and ro or rw, then --, then what to run in
# the root.
_ENTER = r"""
root=$1; shift
while [ "$1" != -- ]; do
    mount --bind "$1" "$root/$2"
    # A bind mount becomes read-only in a second step. Without privileges, the flags that the host has set must stay.
    [ "$3" = rw ] || mount -o remount,bind,ro "$root/$2" 2>/dev/null || mount -o remount,bind,ro,nosuid,nodev "$root/$2"
    shift 3
done
shift
"$@"
"""


@dataclass(frozen=True)
class Python310:
    """A Python 3.10 of the host. prefix: its folder. site: its folders of packages, which the image must not show."""

    prefix: Path
    site: tuple[Path, ...]


class Unavailable(Exception):
    """This machine cannot imitate the image; the text says why."""


class StepFailed(Exception):
    """A step ended with another status than 0. The build ends there, as Docker's does."""

    def __init__(self, step: Instruction, done: subprocess.CompletedProcess[str]) -> None:
        super().__init__(f"{step.name} {step.rest}\nexited with {done.returncode}:\n{done.stdout}{done.stderr}")
        self.step = step
        self.stderr = done.stderr
        self.stdout = done.stdout


@functools.cache
def find_python() -> Python310:
    """Raises Unavailable where no Python 3.10 runs."""
    pyenv = os.environ.get("PYENV_ROOT") or str(Path.home() / ".pyenv")
    places = [shutil.which("python3.10"), *sorted(glob(f"{pyenv}/versions/3.10*/bin/python3.10"), reverse=True)]
    code = "import json, site, sys; print(json.dumps([sys.version_info[:2], sys.base_prefix, site.getsitepackages()]))"
    for place in filter(None, places):
        # pyenv leaves shims on the PATH that exist and fail.
        done = subprocess.run([place, "-I", "-c", code], capture_output=True, text=True)
        if done.returncode == 0:
            version, prefix, site = json.loads(done.stdout)
            if version == [3, 10] and Path(prefix, "bin/python3.10").exists():
                return Python310(Path(prefix), tuple(path for path in map(Path, site) if path.is_dir()))
    raise Unavailable("no Python 3.10 runs here (looked on the PATH and under pyenv)")


@dataclass
class Image:
    """root: the scratch root. read_only: places in it that no step may write to. environment, folder and shell: as the
    steps have left them. ran: the instructions that are done, and printed: what they said."""

    root: Path
    python: Python310
    environment: dict[str, str] = field(default_factory=lambda: dict(ENVIRONMENT))
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    folder: str = "/"
    read_only: list[str] = field(default_factory=list)
    arguments: dict[str, str] = field(default_factory=dict)
    ran: list[Instruction] = field(default_factory=list)
    printed: str = ""

    @property
    def tree(self) -> Path:
        """The vLLM of the image, from outside."""
        return self.root / COREX / PACKAGES / "vllm"

    @property
    def site(self) -> Path:
        """The site packages of its Python, from outside."""
        return self.root / "site"

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """One command in the image."""
        settings = [f"{name}={value}" for name, value in {**self.environment, **environment}.items()]
        inner = ["chroot", str(self.root), f"/{_HOST}/env", "-i", f"--chdir={self.folder}", *settings, *command]
        return self._enter(inner)

    def mounts(self) -> list[str]:
        """``/proc/self/mountinfo`` of a step, the lines about places in the image."""
        lines = self._enter(["cat", "/proc/self/mountinfo"]).stdout.splitlines()
        return [line for line in lines if line.split()[4].startswith(f"{self.root}/")]

    def _enter(self, inner: list[str]) -> subprocess.CompletedProcess[str]:
        identity = [] if os.getuid() == 0 else ["--map-root-user"]
        site = [(str(self.site), str(path)[1:], "rw") for path in self.python.site]
        binds = [word for bind in [*((*bind, "ro") for bind in self._binds()), *site] for word in bind]
        command = ["unshare", "--mount", "--pid", "--net", "--ipc", "--fork", *identity, "sh", "-ec", _ENTER, "sh"]
        return subprocess.run(
            [*command, str(self.root), *binds, "--", *inner],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env={"PATH": _HOST_PATH},
        )

    def _binds(self) -> list[tuple[str, str]]:
        binds = [("/usr/bin", _HOST), ("/dev/null", "dev/null")]
        binds += [(f"/usr/{name}", f"usr/{name}") for name in _LIBRARIES if Path("/usr", name).is_dir()]
        binds += [
            (f"/{name}", name) for name in _LIBRARIES if Path("/", name).is_dir() and not Path("/", name).is_symlink()
        ]
        if self.python.prefix != Path("/usr"):
            binds += [(f"{self.python.prefix}/{name}", f"{self.python.prefix}/{name}"[1:]) for name in ("bin", "lib")]
        return binds + [(str(self.root / place.lstrip("/")), place.lstrip("/")) for place in self.read_only]


def make_image(root: Path, stock: Path) -> Image:
    """A new image in root, which must not exist. stock: a vLLM folder, which is copied. Raises Unavailable."""
    if missing := [name for name in ("unshare", "mount", "chroot") if not shutil.which(name, path=_HOST_PATH)]:
        raise Unavailable(f"no {' and no '.join(missing)} here (Debian: util-linux, coreutils)")
    image = Image(root, find_python())
    for place in ("dev", "tmp", "root", "site", "usr/bin", "usr/local/bin", "opt/python/bin", f"{COREX}/{PACKAGES}"):
        (root / place).mkdir(parents=True, exist_ok=True)
    for name in _LIBRARIES:
        if Path("/", name).is_symlink():
            (root / name).symlink_to(os.readlink(f"/{name}"))
    for source, place in image._binds():
        if Path(source).is_dir():
            (root / place).mkdir(parents=True, exist_ok=True)
        else:
            (root / place).touch()
    (root / "bin").symlink_to("usr/bin")
    for name in PROGRAMS:
        (root / "usr/bin" / name).symlink_to(f"/{_HOST}/{name}")
    (root / "opt/python/bin/python3").symlink_to(image.python.prefix / "bin/python3.10")
    (root / "usr/local/corex").symlink_to("corex-3.2.3")
    pip = sorted(image.python.prefix.glob("lib/python3.10/ensurepip/_bundled/pip-*.whl"))
    if not pip:
        raise Unavailable(f"the Python 3.10 of {image.python.prefix} brings no pip along")
    with zipfile.ZipFile(pip[-1]) as wheel:
        wheel.extractall(image.site)
    shutil.copytree(stock, image.tree)
    done = image.run("python3", "-c", "import sys; print(sys.version_info[:2])")
    if (done.returncode, done.stdout) != (0, "(3, 10)\n"):
        raise Unavailable(f"no Python 3.10 in a mount namespace here: {(done.stderr or done.stdout).strip()}")
    return image


def build(image: Image, context: Path) -> None:
    """Runs the steps of ``context/Dockerfile`` in order. Raises StepFailed at the first one that fails, and ValueError
    for an instruction that cannot be imitated."""
    image.ran, image.printed = [], ""
    for step in parse((context / "Dockerfile").read_text(encoding="utf-8")):
        _do(image, context, step)
        image.ran.append(step)


def _expanded(value: str, environment: dict[str, str]) -> str:
    """Docker's two forms: ``${NAME}``, and ``${NAME:+text}`` for the text where NAME is set and not empty."""

    def given(match: re.Match[str]) -> str:
        name, text = match.groups()
        known = environment.get(name, "")
        return known if text is None else _expanded(text, environment) if known else ""

    return re.sub(r"\$\{(\w+)(?::\+((?:[^{}]|\$\{\w+\})*))?\}", given, value)


def _do(image: Image, context: Path, step: Instruction) -> None:
    if step.name == "FROM":
        if step.rest != BASE or image.ran:
            raise ValueError(f"FROM {step.rest}: the platform wants {BASE}, and one stage")
    elif step.name == "ARG":
        image.arguments |= step.pairs()
    elif step.name == "ENV":
        values = {name: _expanded(value, image.environment) for name, value in step.pairs().items()}
        for name, value in values.items():
            if not value.endswith(image.environment.get(name, "")):
                raise ValueError(f"ENV {name}: what the base image has set would be lost")
        image.environment |= values
    elif step.name == "WORKDIR":
        image.folder = step.rest
        (image.root / step.rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
    elif step.name == "SHELL":
        image.shell = step.words()
    elif step.name == "COPY":
        _copy(image, context, step)
    elif step.name == "RUN":
        command = step.words() if step.rest.startswith("[") else [*image.shell, step.rest]
        done = image.run(*command, **image.arguments)
        if done.returncode:
            raise StepFailed(step, done)
        image.printed += done.stdout + done.stderr
    else:
        raise ValueError(f"{step.name} {step.rest}: cannot be imitated")


def _copy(image: Image, context: Path, step: Instruction) -> None:
    """All of the context. Execute bits get lost, and nobody may write to what was delivered."""
    source, destination = step.words()
    if source != ".":
        raise ValueError(f"COPY {step.rest}: only the whole context is imitated")
    target = image.root / destination.lstrip("/")
    for name in delivered(context):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).unlink(missing_ok=True)
        shutil.copyfile(context / name, target / name)
        (target / name).chmod(0o444)
    if destination not in image.read_only:
        image.read_only.append(destination)
