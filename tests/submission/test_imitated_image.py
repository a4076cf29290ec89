"""The Dockerfile's steps, in order, in an imitated base image: what comes out, and that a bad one gives nothing."""

from __future__ import annotations

import json
import re
import shutil
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from patches.manifest import OVERLAYS
from tests.helpers.overlay_world import differences, snapshot
from tests.submission.conftest import with_crlf
from tests.submission.imitated_image import COREX, PACKAGES, Image, StepFailed, build

RECEIPT = "overlay/receipt.json"
STRICT_SHELL = ["/bin/bash", "-euo", "pipefail", "-c"]


@pytest.fixture(params=["stock", "vendor"])
def tree(request: pytest.FixtureRequest) -> Path:
    """The tree that the image holds."""
    return request.getfixturevalue(request.param)


def test_build(tree: Path, clone: Path, new_image: Callable[[Path], Image]) -> None:
    image = new_image(tree)
    assert_bare(image)
    before = snapshot(image.tree)
    build(image, clone)
    assert_applied(image.tree, tree, clone)
    assert_found_from_the_workspace(image)
    assert_named_files_exist(image)
    assert_read_only(image)
    assert_keeps_to_grammars(image, clone, image.site)

    built = snapshot(image.tree)
    build(image, clone)
    assert "applied: 0 changes" in image.printed
    assert differences(built, snapshot(image.tree)) == [], "a second build changed something"
    done = image.run("bash", "./patch_ops.sh", "revert")
    assert done.returncode == 0, done
    assert differences(before, snapshot(image.tree)) == [], "revert did not bring stock back"


def test_an_image_without_pip(stock: Path, clone: Path, new_image) -> None:
    image = new_image(stock)
    shutil.rmtree(image.site)
    image.site.mkdir()
    build(image, clone)
    assert "No module named pip" in image.printed
    assert_keeps_to_grammars(image, clone, image.tree.parent)


def test_a_wheel_that_is_not_the_one(stock: Path, clone: Path, scratch: Path, new_image) -> None:
    image = new_image(stock)
    clone = shutil.copytree(clone, scratch / "clone")
    wheel, = (clone / "requirements/wheels").glob("*.whl")
    data = bytearray(wheel.read_bytes())
    data[len(data) // 2] ^= 1
    wheel.write_bytes(data)
    with pytest.raises(StepFailed) as failed:
        build(image, clone)
    assert f"{wheel.name}: FAILED" in failed.value.stdout and "llguidance" in failed.value.step.rest
    assert sorted(path.name.partition("-")[0] for path in image.site.iterdir()) == ["pip", "pip"]


@pytest.mark.parametrize("file", ["prepare.py", "completions.py", "fastpath.py"])
def test_an_endpoint_without_the_large_output_path(file, stock: Path, clone: Path, scratch: Path, new_image) -> None:
    image = new_image(stock)
    clone = shutil.copytree(clone, scratch / "clone")
    source = clone / "vllm_overrides/overlay/serving" / file
    source.write_text(source.read_text().replace("_fastpath(", "_path(").replace("VLLM_BASIC_FASTPATH", "FASTPATH"))
    with pytest.raises(StepFailed) as failed:
        build(image, clone)
    (line,) = failed.value.stderr.splitlines()
    assert line.startswith("refused: the large-output path (VLLM_BASIC_FASTPATH) is not in both endpoints: "), line


def test_same_tree_twice_on_the_path_and_a_strict_shell(stock: Path, clone: Path, new_image) -> None:
    """A base image can hand down a SHELL with flags that end a step at the first harmless failure."""
    image = new_image(stock)
    image.shell = STRICT_SHELL
    (image.root / "usr/lib64-of-corex").mkdir()
    (image.root / "usr/lib64-of-corex/vllm").symlink_to(f"/{COREX}/{PACKAGES}/vllm")
    image.environment["PYTHONPATH"] += f":/{COREX}/{PACKAGES}:/usr/lib64-of-corex"
    build(image, clone)
    assert_applied(image.tree, stock, clone)


def test_an_image_whose_path_is_set_in_a_profile(stock: Path, clone: Path, new_image) -> None:
    """Then neither a build step nor the server's command has it, and ours is all there is."""
    image = new_image(stock)
    del image.environment["PYTHONPATH"]
    build(image, clone)
    assert_applied(image.tree, stock, clone)
    assert_found_from_the_workspace(image)


def test_a_second_tree_further_down_the_path_is_left_alone(stock: Path, clone: Path, new_image) -> None:
    image = new_image(stock)
    other = image.root / "usr/local/packages/vllm"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    image.environment["PYTHONPATH"] += ":/usr/local/packages"
    build(image, clone)
    warnings = [line for line in image.printed.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1, image.printed
    assert warnings[0].startswith("warning: /usr/local/packages/vllm is another vllm tree")
    assert_applied(image.tree, stock, clone)
    assert_found_from_the_workspace(image)
    assert [path.name for path in other.iterdir()] == ["__init__.py"]


def change_a_symbol(image: Image, clone: Path) -> str:
    file = image.tree / "core/scheduler.py"
    data, count = re.subn(rb"(\n    def abort_seq_group\()", rb"\n    @staticmethod\1", file.read_bytes())
    assert count == 1
    file.write_bytes(data)
    return (
        r"refused: core/scheduler\.py: FOREIGN: core/scheduler\.py Scheduler\.abort_seq_group is \[.*, stock has \[.*"
    )


def lose_a_stock_file(image: Image, clone: Path) -> str:
    (image.tree / "core/evictor_v2.py").unlink()
    return r"refused: core/evictor_v2\.py: MISSING: .*: install vLLM 0\.6\.3 anew.*"


def crlf_in_a_script(image: Image, clone: Path) -> str:
    with_crlf(clone / "patch_ops.sh")
    return r"refused: CRLF line endings in 1 files: patch_ops\.sh: take .*"


def crlf_in_a_patch_and_the_template(image: Image, clone: Path) -> str:
    patch = next((clone / "patches/edits").rglob("*.patch"))
    with_crlf(patch)
    with_crlf(clone / "chat_template_multi_system.jinja")
    names = f"chat_template_multi_system.jinja {patch.relative_to(clone).as_posix()}"
    return rf"refused: CRLF line endings in 2 files: {re.escape(names)}: take .*"


def crlf_everywhere(image: Image, clone: Path) -> str:
    for file in clone.rglob("*"):
        if file.is_file():
            with_crlf(file)
    return r"refused: CRLF line endings in \d{3} files: (\S+ ){9}\S+: take .*"


def no_python(image: Image, clone: Path) -> str:
    (image.root / "opt/python/bin/python3").unlink()
    return r"refused: the interpreter python3 does not run \(exit status 127\): .*"


def old_python(image: Image, clone: Path) -> str:
    """This one says about itself what Python 3.8 would say."""
    (image.root / "opt/old").mkdir()
    (image.root / "opt/old/sitecustomize.py").write_text("import sys\nsys.version_info = (3, 8, 10)\n")
    image.environment["PYTHONPATH"] += ":/opt/old"
    return r"refused: \S+ is Python 3\.8, and 3\.10 or newer is needed: .*"


def read_only_tree(image: Image, clone: Path) -> str:
    image.read_only.append(f"/{COREX}")
    return rf"refused: /{COREX}/{PACKAGES}/vllm lies on a read-only file system: .*"


def no_vllm(image: Image, clone: Path) -> str:
    """As when an image has moved it."""
    image.tree.rename(image.tree.parent / "moved")
    return r"refused: no vllm on the search path of \S+: .*"


def file_without_a_row(image: Image, clone: Path) -> str:
    (clone / "vllm_overrides/forgotten.py").write_text("")
    return r"refused: in no row: vllm_overrides/forgotten\.py: .*"


def file_that_was_left_out(image: Image, clone: Path) -> str:
    with (clone / ".dockerignore").open("a") as rules:
        rules.write("vllm_overrides/core\n")
    return r"refused: row \S+: vllm_overrides/core/\S+ does not exist"


@pytest.mark.parametrize("spoil", [
    change_a_symbol, lose_a_stock_file, crlf_in_a_script, crlf_in_a_patch_and_the_template, crlf_everywhere, no_python,
    old_python, read_only_tree, no_vllm, file_without_a_row, file_that_was_left_out,
], ids=lambda spoil: spoil.__name__)  # fmt: skip
def test_a_step_that_fails_ends_the_build(spoil, stock: Path, clone: Path, scratch: Path, new_image) -> None:
    image = new_image(stock)
    clone = shutil.copytree(clone, scratch / "clone")
    expected = spoil(image, clone)
    before = snapshot(image.tree)
    with pytest.raises(StepFailed) as failed:
        build(image, clone)
    lines = failed.value.stderr.splitlines()
    assert any(re.fullmatch(expected, line) for line in lines), f"expected {expected}\n{failed.value}"
    assert [line for line in lines if not line.startswith("refused: ")] == [], "not a line that says what to do"
    assert len(lines) == 1 or spoil is file_that_was_left_out, "one cause is one line"
    assert failed.value.step.name == "RUN" and failed.value.step not in image.ran
    assert differences(before, snapshot(image.tree)) == [], "a build that failed left a changed tree"


def test_the_step_after_a_failed_one_does_not_run(stock: Path, clone: Path, scratch: Path, new_image) -> None:
    image = new_image(stock)
    clone = shutil.copytree(clone, scratch / "clone")
    text = (clone / "Dockerfile").read_text().partition("RUN bash")[0]
    (clone / "Dockerfile").write_text(f"{text}RUN false\nRUN touch /reached\n")
    with pytest.raises(StepFailed, match="RUN false"):
        build(image, clone)
    assert not (image.root / "reached").exists()


@pytest.mark.parametrize("line, why", [
    ("ADD x y", "unknown instruction"), ("RUN <<EOF\nx\nEOF", "here-documents"), ("FROM other", "the platform wants"),
    ("ENV PYTHONPATH=/x", "what the base image has set would be lost"), ("USER nobody", "cannot be imitated"),
    ("COPY patches /x", "only the whole context"), ("RUN true \\", "the last line goes on"),
])  # fmt: skip
def test_what_cannot_be_imitated_is_no_success(
    line: str, why: str, stock: Path, clone: Path, scratch: Path, new_image
) -> None:
    clone = shutil.copytree(clone, scratch / "clone")
    (clone / "Dockerfile").write_text((clone / "Dockerfile").read_text().partition("RUN")[0] + line)
    with pytest.raises(ValueError, match=why):
        build(new_image(stock), clone)


def assert_bare(image: Image) -> None:
    """What the real base image lacks or must not use is not there: no accelerator's library, no network, no git."""
    code = (
        "import importlib.util as u, socket\n"
        "print([n for n in ('torch', 'numpy', 'transformers', 'triton', 'yaml') if u.find_spec(n)])\n"
        "try: socket.create_connection(('192.0.2.1', 80), 5)\n"
        "except OSError as error: print(error.strerror)\n"
    )
    done = image.run("python3", "-c", code)
    assert done.stdout.splitlines() == ["[]", "Network is unreachable"], done
    for program in ("git", "curl", "gcc"):
        assert image.run("sh", "-c", f"command -v {program}").returncode != 0, f"{program} is there"


def assert_read_only(image: Image) -> None:
    """A step can write in the scratch root only, of which its site packages are a part: all that comes from the host,
    and the repository, is read-only."""
    site = {f"{image.root}{path}" for path in image.python.site}
    mounts = [line for line in image.mounts() if line.split()[4] not in site]
    assert len(mounts) >= 5, mounts
    assert [line for line in mounts if "ro" not in line.split()[5].split(",")] == []
    for place in ("/host/usr/bin/x", "/usr/lib/x", "/workspace/x", f"{image.python.prefix}/lib/x"):
        done = image.run("touch", place)
        assert done.returncode == 1 and "Read-only file system" in done.stderr, done


def assert_found_from_the_workspace(image: Image) -> None:
    """The command starts in the image's working folder, which Python searches first."""
    assert image.folder == "/workspace"
    code = "import importlib.util, os; print(os.path.realpath(importlib.util.find_spec('vllm').origin))"
    done = image.run("python3", "-B", "-c", code)
    assert done.stdout == f"/{COREX}/{PACKAGES}/vllm/__init__.py\n", done


def assert_keeps_to_grammars(image: Image, clone: Path, folder: Path) -> None:
    """The wheel lies in the folder, byte for byte, and works with nothing but Python beside it."""
    wheel, = (clone / "requirements/wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            if not name.endswith(("/", "/RECORD")):
                assert (folder / name).read_bytes() == packed.read(name), name
    code = (
        "import llguidance as l, sys\n"
        "m = l.LLMatcher(l.LLTokenizer('byte'), l.LLMatcher.grammar_from_json_schema('{\"type\": \"integer\"}'))\n"
        "loaded = [name for name in ('torch', 'numpy') if name in sys.modules]\n"
        "print(m.try_consume_tokens(list(b'12x')), m.is_accepting(), loaded)\n"
    )
    done = image.run("python3", "-B", "-c", code)
    assert done.stdout == "2 True []\n", done
    assert "structured output by llguidance@" in image.printed


def assert_named_files_exist(image: Image) -> None:
    document = yaml.safe_load((image.root / "workspace/computility-run.yaml").read_text())
    named = [word for word in document["command"] if word.startswith("/workspace/")]
    assert named == ["/workspace/chat_template_multi_system.jinja"]
    for path in named:
        assert (image.root / path[1:]).stat().st_size > 1000, path


def assert_applied(built: Path, stock: Path, clone: Path) -> None:
    """By the table and the files alone; nothing of the engine that applied them is used."""
    rows = {overlay.target: overlay for overlay in OVERLAYS}
    sources = {
        path.relative_to(clone / "vllm_overrides").as_posix(): path.read_bytes()
        for path in (clone / "vllm_overrides").rglob("*")
        if path.is_file()
    }
    patches = {
        path.relative_to(clone / "patches/edits").as_posix().removesuffix(".patch"): path.read_text()
        for path in (clone / "patches/edits").rglob("*.patch")
    }
    files = {path.relative_to(built).as_posix() for path in built.rglob("*") if path.is_file()}
    original = {
        path.relative_to(stock).as_posix(): path.read_bytes()
        for path in stock.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    expected = {RECEIPT}
    for path, source in sources.items():
        row = (
            rows.get(path) or rows[next(target for target in rows if target.endswith("/") and path.startswith(target))]
        )
        html = "<!-- vllm-overlay: %s -->"
        comment = {".py": "# vllm-overlay: %s", ".md": html, ".html": html}.get(
            Path(path).suffix, "// vllm-overlay: %s"
        )
        assert (built / path).read_bytes() == source + f"{comment % row.id}\n".encode(), path
        assert (path in original) == (row.kind in ("extension", "replacement")), f"{path} is no {row.kind}"
        expected |= {path}
    for path, patch in patches.items():
        lines = (built / path).read_bytes().decode().splitlines()
        assert lines[-1] == f"# vllm-overlay: {rows[path].id}"
        added = [line[1:] for line in patch.splitlines() if line.startswith("+") and not line.startswith("+++")]
        removed = [line[1:] for line in patch.splitlines() if line.startswith("-") and not line.startswith("---")]
        before = original[path].decode().splitlines()
        assert len(lines) == len(before) + len(added) - len(removed) + 1, path
        remaining = iter(lines)
        assert [line for line in added if line not in remaining] == [], f"{path}: lines of the patch that are not there"
        expected |= {path}
    kept = {str(Path(path).with_name(f"{Path(path).stem}_stock.py")): path for path in expected & original.keys()}
    for path, target in kept.items():
        assert (built / path).read_bytes() == original[target], f"{path} is not the stock file"
    assert files == original.keys() | expected | kept.keys()
    for path in original.keys() - expected:
        assert (built / path).read_bytes() == original[path], f"{path} belongs to no row and was changed"
    receipt = json.loads((built / RECEIPT).read_text())
    assert receipt["count"] == len(OVERLAYS)
    assert {stat.S_IMODE((built / path).stat().st_mode) & 0o444 for path in files} == {0o444}, "not readable by all"
