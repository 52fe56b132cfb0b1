"""The house rules, read off the source: imports go one way, hardware has its place, and `import weft` is light."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import weft

PACKAGE = Path(weft.__file__).parent

# Lower in the list may import higher, never the reverse.
ORDER = (
    "core", "ops", "interp", "autodiff", "frontend", "lang", "rewrite", "schedule", "programs", "cluster", "cost", "record", "plan",
    "codegen", "runtime", "tune", "dynamic", "optim", "nn", "transform", "passes", "api", "report", "cli",
)  # fmt: skip
LEVEL = {name: level for level, name in enumerate(ORDER)}
SOLVERS = {"highspy", "scipy", "z3", "transformers", "networkx", "yaml", "hypothesis", "pytest"}
MAY_NEED_SOLVERS = ("weft.plan.layouts", "weft.plan.stages", "weft.rewrite.prove", "weft.rewrite.discover", "weft.api.trainer")
MAY_NAME_HARDWARE = ("codegen", "runtime", "cluster", "cli.doctor")
HARDWARE = re.compile(r"(?<![a-wyz])(cuda|nvidia|nvlink|nvswitch|infiniband|rocm|tensor_?cores?|[vahb][1-3]00(?!\d)|sm_\d\d)", re.I)


def test_every_import_goes_the_one_way() -> None:
    wrong = [f"{importer} imports {imported}" for importer, imported in _all_imports() if _against(importer, imported)]
    assert not wrong, "imports against the direction of the design:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("importer", "imported", "against"),
    [
        ("weft.ops.linalg", "weft.core.node", False),
        ("weft.core.node", "weft.ops.linalg", True),
        ("weft.cost.price", "weft.codegen.pipeline", True),
        ("weft.cost.price", "weft.plan.layouts", True),
        ("weft.plan.layouts.moves", "weft.cost.price", False),
        ("weft.runtime.worker", "weft.core.errors", False),
        ("weft.runtime.worker", "weft.core.native", False),
        ("weft.runtime.worker", "weft.runtime.faults", False),
        ("weft.runtime.worker", "weft.core.program", True),
        ("weft.codegen.to_cpu", "weft.runtime.launch", True),
        ("weft.api", "weft.runtime.launch", False),
        ("weft.schedule.verbs", "weft.testing", True),
        ("weft.cli.fuzz", "weft.testing.programs", False),
        ("weft.testing", "weft.schedule.verbs", False),
        ("weft.testing", "weft.api.auto", False),
        ("weft.testing", "weft.report.page", True),
        ("weft.core.node", "weft", True),
        ("weft.nowhere.yet", "weft.core", True),
    ],
)
def test_the_direction_itself(importer: str, imported: str, against: bool) -> None:
    assert _against(importer, imported) is against


def test_imports_are_found_wherever_they_hide() -> None:
    source = (
        "from . import errors\nfrom .. import cli, nothing\n"
        "def f():\n    import weft.cli.show\n    import_module('weft.tune')\n    from weft import __version__"
    )
    found = set(_imports("weft.core.layout", ast.parse(source), is_package=False))
    assert found == {"weft.core", "weft.core.errors", "weft.cli", "weft.cli.show", "weft.tune"}


def test_hardware_is_named_only_where_it_belongs() -> None:
    wrong = [
        f"{module}, line {line}: {text!r}"
        for module, line, text in _texts()
        if not module.removeprefix("weft.").startswith(MAY_NAME_HARDWARE) and HARDWARE.search(text)
    ]
    assert not wrong, "hardware belongs in codegen, runtime, cluster and cli/doctor:\n" + "\n".join(wrong)


@pytest.mark.parametrize("text", ["torch.cuda", "is_cuda", "8xH100", "a100-node", "sm_90", "NVLink", "tensor_cores"])
def test_hardware_names_are_seen(text: str) -> None:
    assert HARDWARE.search(text)


@pytest.mark.parametrize("text", ["sm_scale", "b1000", "barracuda", "alpha100", "x100"])
def test_other_words_are_not_hardware(text: str) -> None:
    assert not HARDWARE.search(text)


def test_the_library_knows_no_model_of_the_zoo() -> None:
    """Models by name come from a package of their own, which registers them; weft looks one up and recognises none."""
    named = [module for module, _, text in _texts() if "weft_zoo" in text]
    assert named == ["weft.frontend.catalog"], named


def test_import_weft_is_light() -> None:
    """Counted in modules, which do not depend on how busy the machine is."""
    loaded = _run("import torch, sys; before = set(sys.modules); import weft; print(*(set(sys.modules) - before))")
    assert [name for name in loaded if name.split(".")[0] in SOLVERS | {"rich", "typer", "triton"}] == []
    assert len([name for name in loaded if name.split(".")[0] != "weft"]) < 20, loaded
    assert len(loaded) < 60, loaded


def test_import_weft_alone_does_not_import_torch() -> None:
    assert "torch" not in _run("import weft, sys; print(*sys.modules)")


def test_all_but_solver_and_prover_import_without_solvers() -> None:
    """A machine that runs a plan has torch, triton, numpy, rich and typer alone."""
    wanted = [name for name in map(_module_name, sorted(PACKAGE.rglob("*.py"))) if not name.startswith(MAY_NEED_SOLVERS) and not _is_main(name)]
    script = f"""
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {SOLVERS!r}:
            raise ImportError(name + " is refused here")
sys.meta_path.insert(0, Refuse())
for name in {wanted!r}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        if "is refused here" not in str(error):
            raise
        print(name, "<-", error)
"""
    assert _run(script) == []


def test_every_public_name_is_there() -> None:
    missing = [name for name in weft.__all__ if not hasattr(weft, name)]
    assert not missing
    assert set(weft.__all__) <= set(dir(weft))


def test_no_public_name_hides_a_part() -> None:
    """Importing weft.plan would replace a function `weft.plan`, or not, depending on the order."""
    assert [name for name in weft.__all__ if _exists(f"weft.{name}")] == ["lang", "plan", "schedule"]  # parts; `plan` can be called


def test_type_checkers_see_the_names_that_are_loaded() -> None:
    tree = ast.parse(Path(weft.__file__).read_text())
    seen = {alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names if alias.asname}
    assert seen - {"dynamic", "interp", "nn", "optim"} == set(weft.__all__) - {"__version__"}
    assert len(weft._HOME) < 20


def test_names_that_moved_say_where() -> None:
    with pytest.warns(DeprecationWarning, match="weft.all_reduce is now weft.lang.all_reduce"):
        assert weft.all_reduce is weft.lang.all_reduce
    with pytest.warns(DeprecationWarning, match=r"weft.split is now weft.schedule.split"):
        assert weft.split is weft.schedule.split


def test_a_part_is_loaded_when_asked_for() -> None:
    assert _run("import weft, sys; print('weft.core' in sys.modules, weft.core.__name__)") == ["False", "weft.core"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'weft' has no attribute 'paralelize'"):
        weft.paralelize  # noqa: B018


# --- reading the source


def _against(importer: str, imported: str) -> bool:
    """Whether one weft module may not import another."""
    high, low = _part(importer), _part(imported)
    if high == low:
        return False
    if high == "" or low == "":  # the root only names what the others define
        return low == "" and high not in ("cli", "__main__")
    if high == "__main__":
        return low != "cli"
    if high == "runtime":
        return imported not in ("weft.core", "weft.core.errors", "weft.core.cache", "weft.core.native", "weft.core.pairs")
    if low == "testing":
        return high != "cli"
    if high == "testing":
        return LEVEL[low] > LEVEL["api"]
    return high not in LEVEL or low not in LEVEL or LEVEL[low] > LEVEL[high]


def _part(module: str) -> str:
    """`cost` for weft.cost.price; empty for weft itself."""
    return [*module.split("."), ""][1]


def _all_imports() -> Iterator[tuple[str, str]]:
    for module, tree in _modules():
        is_package = (PACKAGE.parent / module.replace(".", "/")).is_dir()
        for imported in _imports(module, tree, is_package):
            yield module, imported


def _imports(module: str, tree: ast.Module, is_package: bool) -> Iterator[str]:
    """Every weft module an import statement or a call of import_module names, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = _named_by(node, module, is_package)
        elif isinstance(node, ast.Call) and "import_module" in (getattr(node.func, "id", ""), getattr(node.func, "attr", "")):
            names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "weft")


def _named_by(node: ast.ImportFrom, module: str, is_package: bool) -> list[str]:
    """What `from base import names` imports: base, unless it is the root, and those names that are modules."""
    parents = module.split(".") if is_package else module.split(".")[:-1]
    up = parents[: len(parents) - node.level + 1] if node.level else []
    base = ".".join([*up, *([node.module] if node.module else [])])
    submodules = [f"{base}.{alias.name}" for alias in node.names if _exists(f"{base}.{alias.name}")]
    if base == "weft":
        return submodules + [weft._HOME[alias.name] for alias in node.names if alias.name in weft._HOME]
    return [base, *submodules]


def _exists(module: str) -> bool:
    path = PACKAGE.parent / module.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


@functools.cache
def _modules() -> list[tuple[str, ast.Module]]:
    files = sorted(PACKAGE.rglob("*.py"))
    return [(_module_name(file), ast.parse(file.read_text(), str(file))) for file in files]


def _module_name(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def _is_main(module: str) -> bool:
    return module.endswith(".__main__")


def _words(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Identifiers and string constants with their lines; docstrings and comments may speak of anything."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield line, node.value
        for field in ("id", "attr", "arg", "name", "module"):
            if isinstance(text := getattr(node, field, None), str):
                yield line, text


@functools.cache
def _texts() -> list[tuple[str, int, str]]:
    """The words of every module."""
    return [(module, line, text) for module, tree in _modules() for line, text in _words(tree)]


def _run(script: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
