"""The package as it is installed: what is in it, what importing it costs, and what of torch it touches."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
HOISTED = ("passes", "codegen")  # at the top level of the repository, below fo_compiler when installed


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def sources(*roots: str) -> Iterator[Path]:
    for root in roots:
        yield from sorted((ROOT / root).rglob("*.py"))


def test_every_sub_package_is_listed_for_the_wheel() -> None:
    found = {"fo_compiler"}
    for name in HOISTED:
        found.add(f"fo_compiler.{name}")
        found |= {
            f"fo_compiler.{name}." + ".".join(init.parent.relative_to(ROOT / name).parts)
            for init in (ROOT / name).glob("*/**/__init__.py")
        }
    for init in (ROOT / "fo_compiler").rglob("__init__.py"):
        parts = init.parent.relative_to(ROOT).parts
        if len(parts) > 1 and parts[1] not in HOISTED:
            found.add(".".join(parts))
    assert set(SETUPTOOLS["packages"]) == found


def test_every_folder_with_code_is_a_package() -> None:
    for path in sources("fo_compiler", *HOISTED):
        assert (path.parent / "__init__.py").exists(), path


@pytest.mark.parametrize("name", HOISTED)
def test_a_package_at_the_top_level_is_mapped_and_linked(name: str) -> None:
    assert SETUPTOOLS["package-dir"][f"fo_compiler.{name}"] == name
    link = ROOT / "fo_compiler" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    assert (ROOT / name).is_dir()
    assert not (ROOT / name).is_symlink()


def test_the_entry_points_lead_to_functions() -> None:
    import importlib

    project = PROJECT["project"]
    targets = [*project["entry-points"]["torch_dynamo_backends"].values(), *project["scripts"].values()]
    for target in targets:
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_the_version_is_the_package_s_own() -> None:
    import fo_compiler

    assert SETUPTOOLS["dynamic"]["version"]["attr"] == "fo_compiler.__version__"
    assert fo_compiler.__version__.count(".") == 2


def test_the_public_names_all_load_and_an_unknown_one_is_an_attribute_error() -> None:
    import fo_compiler

    for name in fo_compiler.__all__:
        assert getattr(fo_compiler, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = fo_compiler.no_such_name


@pytest.mark.parametrize(
    "module",
    ["fo_compiler", "fo_compiler.passes", "fo_compiler.codegen", "fo_compiler.codegen.kernels", "fo_compiler.commands"],
)
def test_importing_a_package_is_cheap(module: str) -> None:
    code = f"import sys, {module}; print([m for m in sys.modules if m.split('.')[0] in ('torch', 'triton', 'sympy')])"
    assert python(code) == "[]"


@pytest.mark.slow
def test_importing_the_backend_does_not_import_inductor() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import fo_compiler.backend; new = set(sys.modules) - before;"
        "print([m for m in new if m.startswith(('torch._inductor', 'triton'))])"
    )
    assert python(code) == "[]"


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Each private module or name of torch that a module imports, or reaches as an attribute of `torch`."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            parts = name.split(".")
            private = any(p.startswith("_") and not p.endswith("__") for p in parts) or "distributed_c10d" in parts
            # Neither the class of ATen ops nor functional collectives have a public name; `torch.ops` is the public door
            # to registered ops.
            allowed = (
                name.startswith("torch._ops.OpOverload")
                or name in ("torch._ops", "torch.distributed._functional_collectives")
                or parts[1:2] == ["ops"]
            )
            if parts[0] == "torch" and private and not allowed:
                yield node.lineno, name


def test_private_names_of_torch_are_used_in_the_adapter_only() -> None:
    adapter = ROOT / "fo_compiler" / "torch_adapter.py"
    assert list(private_names(ast.parse(adapter.read_text())))
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sources("fo_compiler", *HOISTED, "examples", "benchmarks")
        if path != adapter and not path.parent.is_symlink()
        for line, name in private_names(ast.parse(path.read_text()))
    ]
    assert found == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    int(version("setuptools").split(".")[0]) < 77,
    reason="without build isolation it needs the setuptools of pyproject.toml",
)
def test_a_wheel_has_all_packages_under_one_name(tmp_path: Path) -> None:
    source = tmp_path / "source"
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            tmp_path,
            source,
        ],
        check=True,
        timeout=240,
    )
    (wheel,) = tmp_path.glob("*.whl")
    files = set(zipfile.ZipFile(wheel).namelist())
    tops = {file.split("/")[0] for file in files}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fo_compiler"}
    for root in ("fo_compiler", *HOISTED):
        for path in sources(root):
            inside = path.relative_to(ROOT).as_posix()
            inside = inside if root == "fo_compiler" else f"fo_compiler/{inside}"
            assert inside in files
