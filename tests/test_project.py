"""What the project promises about itself: what importing it does, what its documents say, what its files contain."""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import ncgru

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ncgru"
LAB = PACKAGE / "lab"

# Run in a fresh interpreter: torch first, so that all that is seen afterwards is the doing of ncgru.
WATCHED_IMPORT = """
import json, logging, sys
import torch

class Watch:
    asked = []

    def find_spec(self, name, path=None, target=None):
        self.asked.append(name)

def state():
    return [logging.root.level, list(logging.root.handlers), torch.get_default_dtype(), torch.get_num_threads()]

before, modules, variables = state(), set(sys.modules), []
sys.meta_path.insert(0, Watch())
# Comparing os.environ would miss a variable that this process has inherited from one that imported ncgru before.
sys.addaudithook(lambda event, args: variables.append(str(args[0])) if event in ("os.putenv", "os.unsetenv") else None)
import ncgru
loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.split(".")[0] == "ncgru"]
print(json.dumps({
    "asked": Watch.asked,
    "loaded": sorted(set(sys.modules) - modules),
    "unchanged": state() == before,
    "variables": variables,
    "handlers": sum(len(logger.handlers) for logger in loggers),
    "cuda": torch.cuda.is_initialized(),
}))
"""


def run_python(*arguments: str) -> str:
    """The standard output of a fresh interpreter in which every warning is an error."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported_modules(path: Path) -> Iterator[str]:
    """Every module that a file imports anywhere, by its full name."""
    package = ".".join(path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            # `from package import x` may import the module package.x.
            yield from (f"{module}.{alias.name}" for alias in node.names)


def tracked_files() -> list[Path]:
    """The project's text files: what git tracks or would track."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def documented_objects() -> Iterator[object]:
    """What the API pages show: the object behind each line `::: name`, and for a module its public names too."""
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            found = resolve(name)
            yield found
            if isinstance(found, ModuleType):
                yield from (getattr(found, public) for public in getattr(found, "__all__", ()))


def resolve(name: str) -> object:
    """The module or the member of a module with this full name."""
    module, _, member = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return getattr(importlib.import_module(module), member)


def library_files() -> list[Path]:
    """The files of the library proper: the package without its laboratory."""
    return [path for path in sorted(PACKAGE.rglob("*.py")) if not path.is_relative_to(LAB)]


def test_library_imports_only_torch_and_the_standard_library() -> None:
    allowed = sys.stdlib_module_names | {"torch", "ncgru"}
    foreign = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in library_files()
        for module in imported_modules(path)
        if module.split(".")[0] not in allowed or f"{module}.".startswith("ncgru.lab.")
    }
    assert len(library_files()) >= 10
    assert not foreign


def test_importing_changes_nothing_and_loads_nothing_heavy() -> None:
    seen = json.loads(run_python("-c", WATCHED_IMPORT))
    allowed = sys.stdlib_module_names | {"torch", "ncgru"}
    assert "ncgru" in seen["asked"]
    assert {name for name in seen["asked"] if name.split(".")[0] not in allowed} == set()
    assert not [name for name in seen["loaded"] if f"{name}.".startswith(("ncgru.lab.", "torch._inductor."))]
    assert seen["unchanged"] is True
    assert seen["variables"] == []
    assert seen["handlers"] == 0
    assert seen["cuda"] is False


def test_public_names_are_few_documented_and_in_the_api_pages() -> None:
    documented = [id(found) for found in documented_objects()]
    assert len(ncgru.__all__) == len(set(ncgru.__all__))
    assert 15 <= len(ncgru.__all__) <= 22
    for name in set(ncgru.__all__) - {"__version__"}:
        public = getattr(ncgru, name)
        assert public.__doc__, f"{name} has no docstring"
        assert id(public) in documented, f"{name} is missing in docs/api"


def test_promised_names_are_public() -> None:
    promised = "NCGRU NCGRUCell ScoRNN ScoRNNCell GORU GORUCell ModReLU orthogonal ScaledCayley cayley inverse_cayley"
    promised += " resolve_backend available_backends BackendUnavailableError diagnostics __version__"
    assert set(promised.split()) <= set(ncgru.__all__)


def test_version_stands_in_one_place_and_opens_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d$", changelog, re.MULTILINE)
    assert released[0] == ncgru.__version__
    assert f"version: {ncgru.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert ncgru.__version__ not in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_readme_example_is_short_and_learns() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example, *others = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 12
    losses = [float(line.split()[-1]) for line in run_python("-c", example).splitlines()]
    assert len(losses) >= 3
    assert losses[-1] < 0.1 * losses[0]
    for other in others:
        run_python("-c", f"import torch, ncgru\n{other}")


def test_examples_of_docstrings_run() -> None:
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    names = vars(ncgru) | {"torch": torch}
    for found in documented_objects():
        for example in finder.find(found, getattr(found, "__name__", ""), extraglobs=names):
            runner.run(example)
    assert runner.failures == 0
    assert runner.tries >= 8


@pytest.mark.parametrize("page", ["getting-started.md"])
def test_examples_of_a_page_run(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert examples
    run_python("-c", "\n".join(examples))


def test_files_name_no_place_on_a_machine() -> None:
    place = re.compile(r"(?<![\w.}])/(work|root|tmp|home)/\w")
    named = []
    for path in tracked_files():
        text = path.read_text(encoding="utf-8")
        named += [f"{path.relative_to(ROOT)}: {match[0]}" for match in place.finditer(text)]
    assert not named


def test_relative_links_of_the_readme_lead_somewhere() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)]+)\)", readme) if not link.startswith(("https:", "#"))]
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]
