"""Imports go one way, files that travel inside checkpoints stand alone, and each pair of values is tested."""

import ast
import re
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_imports, get_relative_imports

from tests.conftest import covering

ROOT = Path(__file__).parents[1]
PACKAGE = "hf_recurrent_lengthgen"

LEAVES = (
    *("checkpoints.papers", "checkpoints.private_text", "evaluation.text_configs"),
    *("hub_access", "versions", "yaml_files"),
)
"""Modules that import nothing of ours and may be imported by all."""
# What the modules of a part may import of ours, besides modules of the same part. "" is the package itself.
KEPT = ("checkpoints.adapters", "checkpoints.records", "checkpoints.tensor_files")
"""What a checkpoint holds."""
MAY_IMPORT = {
    "models": (),
    "hybrids": ("models",),
    "checkpoints": (),
    "checkpoints.tensor_files": ("checkpoints.records",),
    "checkpoints.adapters": (
        "models",
        "evaluation.json_schema",
        "evaluation.files",
        "checkpoints.records",
        "checkpoints.tensor_files",
    ),
    "checkpoints.loading": ("models", "hybrids", *KEPT),
    "checkpoints.methods": (),
    "checkpoints.records": ("evaluation.json_schema", "evaluation.files", "evaluation.results", "checkpoints.methods"),
    "checkpoints.sources": ("models", "checkpoints.loading", *KEPT),
    "checkpoints.conversion": ("models", "checkpoints.loading", "checkpoints.sources", *KEPT),
    "checkpoints.verification": ("models", "evaluation", "checkpoints.loading", "checkpoints.conversion", *KEPT),
    "surgery": ("models", "hybrids"),
    "surgery.calibration": ("models", "evaluation"),
    "data": ("models",),
    "evaluation": ("models", "data"),
    "evaluation.settings": (),
    "evaluation.json_schema": ("evaluation.views",),
    "evaluation.views": (),
    "evaluation.results": ("evaluation.json_schema",),
    "evaluation.formatting": ("evaluation.results",),
    "plotting": ("evaluation.results",),
    "metrics": ("models", "data", "evaluation", "plotting"),
    "state_files": ("models", "evaluation"),
    "harness": ("models", "hybrids", "checkpoints.loading", "data", "evaluation"),
    "checkpoints.card_mark": ("evaluation.json_schema", "checkpoints.records"),
    "checkpoints.cards": (
        *("models", "evaluation", "metrics", "plotting"),
        *("checkpoints.loading", "checkpoints.methods", "checkpoints.card_mark", *KEPT),
    ),
    "checkpoints.hub": ("models", "checkpoints.card_mark", "checkpoints.conversion", *KEPT),
    "recipes": (),
    "trainers": (
        "models",
        "hybrids",
        "surgery",
        "data",
        "evaluation",
        "metrics.context_harm.measure",
        "metrics.context_harm.windows",
        "metrics.misalignment",
        "metrics.remembrance.measure",
        "metrics.retrieval.measure",
        "checkpoints.adapters",
        "checkpoints.methods",
        "checkpoints.records",
        "checkpoints.sources",
        "checkpoints.loading",
    ),
    "cli": (
        "",
        "checkpoints",
        "data",
        "evaluation",
        "harness",
        "hybrids",
        "metrics",
        "models",
        "plotting",
        "recipes",
        "state_files",
        "surgery",
        "trainers",
    ),
    "": ("models", "hybrids", "checkpoints.loading", "surgery", "data", "metrics", "plotting", "trainers"),
}
METRICS = ("accuracy", "context_harm", "diagnosis", "maps", "retrieval", "states")
RESULTS = tuple(f"metrics.{metric}.result" for metric in METRICS)
"""Read without measuring or drawing."""
for _metric in METRICS:
    MAY_IMPORT[f"metrics.{_metric}.result"] = ("evaluation.json_schema", "evaluation.results", *RESULTS)
    MAY_IMPORT[f"metrics.{_metric}.figure"] = ("evaluation.results", "plotting", *RESULTS)
    if _metric != "diagnosis":  # which makes all parts
        MAY_IMPORT[f"metrics.{_metric}.measure"] = ("models", "data", "evaluation", "metrics")
MAY_IMPORT["metrics.states.attention_windows"] = ("data", "evaluation", "hybrids.windows", "metrics")
MAY_IMPORT["metrics.maps.result"] += ("models.state_on_disk",)
MAY_IMPORT["metrics.diagnosis.result"] += (
    "metrics.repeated_token",
    "metrics.misalignment",
    "metrics.remembrance.measure",
)
for _leaf in LEAVES:
    MAY_IMPORT[_leaf] = ()

# Transformers installs nothing for remote code: what stands outside `try` must be there with Transformers.
CHECKPOINT_IMPORTS = {"torch", "transformers", "safetensors", "numpy"} | sys.stdlib_module_names

# How Transformers looks for the files that a checkpoint's code needs: by lines, docstrings included.
RELATIVE_IMPORT_LINE = re.compile(r"^\s*(?:import\s+\.|from\s+\.).*$", flags=re.MULTILINE)


def source_files() -> list[Path]:
    """Every Python file of ours, relative to the repository; trainers/ by its import name only."""
    folders = [PACKAGE, f"{PACKAGE}/trainers", "tests", "benchmarks", "examples"]
    return sorted({path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.py")})


def module_name(path: Path) -> str:
    """The name inside our package: "models.scan_ssd", "models" for its __init__.py."""
    parts = path.with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(tree: ast.AST, path: Path) -> list[tuple[int, str]]:
    """Line and absolute name of each module that is imported; `from package import part` names the part."""
    parts = {f"{PACKAGE}.{part}" for part in (*MAY_IMPORT, *LEAVES) if part}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = list(path.parts[: len(path.parts) - node.level]) if node.level else []
            module = ".".join(parent + ([node.module] if node.module else []))
            names = (f"{module}.{alias.name}" for alias in node.names)
            found += [(node.lineno, name if name in parts else module) for name in names]
    return found


def is_inside(module: str, part: str) -> bool:
    return module == part or (part != "" and module.startswith(f"{part}."))


def violations(path: Path, source: str) -> list[str]:
    """What the file at `path`, relative to the repository, imports against the rules."""
    tree = ast.parse(source)
    ours = path.parts[0] == PACKAGE
    module = module_name(path) if ours else None
    problems = []

    part = None
    if module is not None:
        part = max((one for one in MAY_IMPORT if is_inside(module, one)), key=len, default=None)
        if part is None:
            return [f"{path}: MAY_IMPORT has no rule for the part {module.partition('.')[0]!r}"]

    for line, name in imported_modules(tree, path):
        if part is None or not is_inside(name, PACKAGE):
            continue
        target = name.removeprefix(PACKAGE).removeprefix(".")
        own = part if "." not in part or part.startswith("checkpoints.") else None
        allowed = (*MAY_IMPORT[part], *LEAVES, *([own] if own else []))
        if not any(is_inside(target, other) for other in allowed):
            problems.append(f"{path}:{line}: {part or PACKAGE} must not import {name}")

    if part == "trainers":
        problems += [
            f"{path}:{node.lineno}: relative import; write {PACKAGE}.trainers"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.level
        ]
    if part == "models":
        problems += [f"{path}:{problem}" for problem in checkpoint_violations(tree, source, path)]
    return problems


def checkpoint_violations(tree: ast.AST, source: str, path: Path) -> list[str]:
    """What keeps a file of models/ from working inside a checkpoint."""
    problems = []
    if len(path.parts) != 3:
        problems.append("1: models/ is flat, checkpoints hold no folders")
    import_lines = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            import_lines.add(node.lineno)
        if isinstance(node, ast.Import) and any(is_inside(alias.name, PACKAGE) for alias in node.names):
            problems.append(f"{node.lineno}: package-absolute import")
        if isinstance(node, ast.ImportFrom) and node.level == 0 and is_inside(node.module or "", PACKAGE):
            problems.append(f"{node.lineno}: package-absolute import")
        if isinstance(node, ast.ImportFrom) and node.level:
            sibling = node.level == 1 and node.module is not None and "." not in node.module
            if not sibling or (any(alias.name == "*" for alias in node.names) and node.module != "extras"):
                problems.append(f"{node.lineno}: not of the form `from .file import name`")
    for match in RELATIVE_IMPORT_LINE.finditer(source):
        line = source.count("\n", 0, match.end()) + 1
        if line not in import_lines:
            problems.append(f"{line}: text that Transformers takes for a relative import")
    return problems


def test_every_file_keeps_the_import_rules() -> None:
    files = source_files()
    assert {module_name(path) for path in files if path.parts[0] == PACKAGE} >= {"", "models", "trainers"}
    assert [problem for path in files for problem in violations(path, (ROOT / path).read_text())] == []


@pytest.mark.parametrize("path", sorted((ROOT / PACKAGE / "models").glob("*.py")), ids=lambda path: path.name)
def test_transformers_finds_only_siblings_and_its_own_dependencies_in_model_files(path: Path) -> None:
    assert set(get_imports(path)) <= CHECKPOINT_IMPORTS
    assert all((path.parent / f"{name}.py").is_file() for name in get_relative_imports(path))


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("models/a.py", "from hf_recurrent_lengthgen.models.b import c", "1: package-absolute"),
        ("models/a.py", "from . import b", "1: not of the form"),
        ("models/a.py", "from .b.c import d", "1: not of the form"),
        ("models/a.py", "from ..surgery.b import c", "models must not import"),
        ("models/a.py", '"""Load\n\n    from .b import c\n"""', "3: text that Transformers takes"),
        ("models/b/a.py", "import torch", "flat"),
        ("data/a.py", "from hf_recurrent_lengthgen import Something", "data must not import"),
        ("data/a.py", "def f():\n    import hf_recurrent_lengthgen.cli.main", "a.py:2: data must not import"),
        ("evaluation/results.py", "from .a import b", "evaluation.results must not import"),
        ("trainers/a.py", "def f():\n    from hf_recurrent_lengthgen.checkpoints.cards import b", "trainers must not"),
        ("trainers/a.py", "from .base import b", "relative import"),
        ("__init__.py", "from hf_recurrent_lengthgen.cli.main import main", "must not import"),
        ("newpart/a.py", "import torch", "no rule for the part 'newpart'"),
    ],
)
def test_a_violation_is_found(path: str, source: str, complaint: str) -> None:
    problems = violations(Path(PACKAGE, path), source)
    assert any(complaint in problem for problem in problems), problems


@pytest.mark.slow
def test_what_a_training_does_not_use_is_not_imported(tmp_path: Path) -> None:
    unused = {"matplotlib", "scipy.stats", "trl", "sklearn", "torch.utils.tensorboard"}
    line = "train --model model_cards/mamba2-base --max-steps 1 --per-device-train-batch-size 1 --use-cpu --output"
    used = f"print('loaded', {unused} & sys.modules.keys())"
    code = f"import sys\nfrom {PACKAGE}.cli import main\nmain.main({line.split()} + [sys.argv[1]])\n{used}"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "out"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "loaded set()", done.stdout + done.stderr


def test_cases_of_many_parameters_have_each_pair_of_values() -> None:
    cases = [*product(range(3), "abcd", (True, False), range(5))]
    chosen = [cases[index] for index in covering(cases)]
    assert 20 <= len(chosen) < 30 < len(cases)
    assert {pair for case in chosen for pair in combinations(enumerate(case), 2)} == {
        pair for case in cases for pair in combinations(enumerate(case), 2)
    }
    assert len(covering([*product(range(3), "abcd")])) == 12, "of two parameters, all"
    assert covering([()]) == {0}
