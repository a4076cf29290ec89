"""Deployed code runs on the vendor image's torch 2.1: no name that is newer may appear in it."""
import ast
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEPLOYED = HERE.parent.parent / "vllm_overrides"
NEWER = set((HERE / "newer_than_torch_2_1.txt").read_text().split())


def newer_names(source: str) -> list[tuple[int, str]]:
    """(line, name) of every torch function, class or tensor method in `source` that torch 2.1.0 lacks.

    A method is known by its name alone, whatever object it is called on; none of the newer ones is a common word.
    """
    aliases: dict[str, str] = {}
    found: list[tuple[int, str]] = []

    def dotted(node: ast.AST) -> str:
        if isinstance(node, ast.Name):
            return aliases.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{dotted(node.value)}.{node.attr}"
        return ""

    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases.update({name.asname: name.name for name in node.names if name.asname})
        elif isinstance(node, ast.ImportFrom) and node.module:
            aliases.update({name.asname or name.name: f"{node.module}.{name.name}" for name in node.names})
            found += [(node.lineno, f"{node.module}.{name.name}") for name in node.names]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found += [(node.lineno, dotted(node)), (node.lineno, f".{node.attr}")]
    return [(line, name) for line, name in found if name in NEWER]


def test_deployed_code_uses_only_torch_2_1():
    files = sorted(DEPLOYED.rglob("*.py"))
    assert files, f"no deployed code under {DEPLOYED}"
    found = [f"{path.relative_to(DEPLOYED)}:{line}: {name}"
             for path in files for line, name in newer_names(path.read_text())]
    assert not found, "newer than torch 2.1:\n" + "\n".join(found)


def test_the_check_sees_newer_names():
    source = "import torch\nimport torch.nn.functional as F\nF.rms_norm(x)\ntorch.get_default_device()\nx.xpu()\n"
    assert [name for _, name in newer_names(source)] == ["torch.nn.functional.rms_norm", "torch.get_default_device"]
