"""The layout of the repository: linked folders, listed packages, imports that stay apart."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKED = ("schemas", "store", "replay")
LIMITS = {"schemas": {"schemas"}, "store": {"schemas", "store"}}


def run(code: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=120
    )


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_listed_packages_are_the_folders_that_exist() -> None:
    tool = project()["tool"]["setuptools"]
    inits = [*(ROOT / "molt").glob("*/__init__.py"), *(ROOT / "molt").glob("*/*/__init__.py")]
    own = {p.parent for p in inits} | {ROOT / "molt"}
    found = {".".join(p.relative_to(ROOT).parts) for p in own}
    assert set(tool["packages"]) == found
    assert tool["package-dir"] == {f"molt.{name}": name for name in LINKED}


@pytest.mark.parametrize("name", LINKED)
def test_a_linked_folder_has_one_name_only(name: str, tmp_path: Path) -> None:
    link = ROOT / "molt" / name
    assert os.readlink(link) == f"../{name}" and (link / "__init__.py").is_file()
    result = run(f"import {name}")
    assert result.returncode == 1 and f"import molt.{name}, not {name}" in result.stderr


def test_a_users_own_schemas_module_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "schemas.py").write_text("mine = 1\n")
    code = "import sys; sys.path.insert(0, '.'); import schemas, molt.store, molt.schemas\n"
    code += "assert schemas.mine == 1 and molt.schemas.__name__ == 'molt.schemas'"
    assert run(code, tmp_path).returncode == 0


@pytest.mark.parametrize("module", ["molt.schemas.check", "molt.store", "molt.store.sql"])
def test_the_store_needs_no_training_stack(module: str) -> None:
    heavy = {"torch", "vllm", "ray", "transformers", "nemo_automodel"}
    code = f"import sys, {module}; print(sorted({heavy!r} & set(sys.modules)))"
    result = run(code)
    assert result.stdout.strip() == "[]", result.stderr


def imports(path: Path) -> set[str]:
    """Modules that a file imports, top-level and inside functions."""
    out: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            out.add(node.module)
    return out


@pytest.mark.parametrize("folder", LIMITS)
def test_imports_point_one_way(folder: str) -> None:
    """schemas <- store <- replay <- molt."""
    files = list((ROOT / folder).glob("*.py"))
    assert files
    for path in files:
        for module in imports(path):
            if module.split(".")[0] == "molt":
                assert module.split(".")[1] in LIMITS[folder], f"{path.name} imports {module}"


def test_the_typed_marker_and_the_golden_files_are_shipped() -> None:
    data = project()["tool"]["setuptools"]["package-data"]
    assert data["molt"] == ["py.typed"] and (ROOT / "molt" / "py.typed").is_file()
    assert data["molt.schemas"] == ["golden/*"] and list((ROOT / "schemas" / "golden").iterdir())


@pytest.mark.parametrize("folder", ["schemas", "store", "replay", "molt", "tests"])
def test_source_files_stay_short(folder: str) -> None:
    files = [p for p in (ROOT / folder).rglob("*.py") if not p.is_symlink()]
    long = {p.name: n for p in files if (n := len(p.read_text().splitlines())) > 500}
    assert long == {}
