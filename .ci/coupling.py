"""How much of other libraries' insides the package relies on, and how much there is to own.

python .ci/coupling.py [--check]

Prints what a release of another library may rename without a word: private methods of its classes that ours override,
private attributes that our code reads, private names that it imports, and what it assigns to in modules and classes of
others; then lines and `raise` of each folder. With --check, it fails if a name is not in the table of
docs/how_it_works.md, which gives the reason for each, or if the table has one that is gone.
"""

import ast
import importlib
import inspect
import pkgutil
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "hf_recurrent_lengthgen"
FOREIGN = (
    "accelerate",
    "datasets",
    "huggingface_hub",
    "lm_eval",
    "peft",
    "safetensors",
    "torch",
    "transformers",
    "trl",
)
MEANT = re.compile("_(asdict|exit|field_defaults|fields|init_weights|loglikelihood_tokens|replace)|allow_tf32")
"""What its library documents for this use."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("_") and not MEANT.fullmatch(name)


def is_foreign(name: str) -> bool:
    return name.partition(".")[0] in FOREIGN


def sources() -> list[str]:
    files = (file for folder in (PACKAGE, "trainers") for file in (ROOT / folder).rglob("*.py"))
    return [file.read_text(encoding="utf-8") for file in files]


def overridden() -> set[str]:
    """Private methods of foreign classes that ours define; a harness loads its tasks itself, a kernel needs Triton."""
    package, found = importlib.import_module(PACKAGE), set()
    names = [one.name for one in pkgutil.walk_packages(package.__path__, f"{PACKAGE}.")]
    names = [name for name in names if ".tasks." not in name and not name.endswith(".scan_selective_kernel")]
    values = [value for name in names for value in vars(importlib.import_module(name)).values()]
    for cls in {one for one in values if inspect.isclass(one) and one.__module__.startswith(PACKAGE)}:
        for name, value in vars(cls).items():
            if is_private(name) and (inspect.isroutine(value) or isinstance(value, property)):
                owners = [base.__name__ for base in cls.__mro__ if name in vars(base) and is_foreign(base.__module__)]
                found |= {f"{owner}.{name}" for owner in owners[-1:]}
    return found


def coupling() -> dict[str, set[str]]:
    """All names, by what is done with them."""
    nodes = [list(ast.walk(ast.parse(text))) for text in sources()]
    ours = {node.name for each in nodes for node in each if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stored = [node for each in nodes for node in each if isinstance(getattr(node, "ctx", None), ast.Store)]
    ours |= {getattr(node, "id", getattr(node, "attr", "")) for node in stored}
    read, read_from_self, imported, swapped = set[str](), set[str](), set[str](), set[str]()
    for each in nodes:
        foreign = set()
        for node in each:
            if isinstance(node, ast.Import | ast.ImportFrom):
                start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                theirs = [one for one in node.names if is_foreign(start + one.name)]
                imported |= {start + one.name for one in theirs if any(map(is_private, (start + one.name).split(".")))}
                foreign |= {(one.asname or one.name).partition(".")[0] for one in theirs}
        for node in each:
            if isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value)
                if isinstance(node.ctx, ast.Store) and owner.partition(".")[0] in foreign:
                    swapped |= set() if MEANT.fullmatch(node.attr) else {ast.unparse(node)}
                elif is_private(node.attr) and node.attr not in ours:
                    (read_from_self if owner in ("self", "cls", "super()", "trainer") else read).add(node.attr)
    kinds = ("overridden", "read from classes that ours extend", "read elsewhere", "imported", "swapped")
    return dict(zip(kinds, (overridden(), read_from_self, read, imported, swapped), strict=True))


def problems(found: dict[str, set[str]]) -> list[str]:
    """Names that the page does not have, and names that only the page has."""
    page = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")
    rows = " ".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    listed = {name.rpartition(".")[2] for name in re.findall(r"`([\w.]+)`", rows)}
    names = {name.rpartition(".")[2] for each in found.values() for name in each}
    missing = [f"{name} has no row in docs/how_it_works.md" for name in sorted(names - listed)]
    text = "\n".join(sources())
    return missing + [f"{name} has a row there, but no use" for name in sorted(listed) if name not in text]


def main() -> int:
    found = coupling()
    for what, names in found.items():
        print(f"{len(names)} private names of other libraries {what}:", *sorted(names))
    for folder in sorted(
        {file.parent for top in (PACKAGE, "trainers", "tests") for file in (ROOT / top).rglob("*.py")}
    ):
        lines = [line for file in folder.glob("*.py") for line in file.read_text(encoding="utf-8").splitlines()]
        raised = sum(re.search(r"\braise\b", line) is not None for line in lines)
        print(f"{len(lines):6} lines, {raised:3} of them with raise: {folder.relative_to(ROOT)}")
    wrong = problems(found) if "--check" in sys.argv else []
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
