"""Sources of text: a corpus that is on every machine, and any dataset that `datasets` can read.

`standard_library_corpus()` needs no download; `load_texts()` reads files, folders and datasets of the Hub.
"""

import glob
import hashlib
import os
import platform
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import datasets

# Third-party code, tests (odd on purpose), and files that differ between machines with the same Python.
_SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "config-*")
_SKIPPED_FILES = ("sitecustomize.py", "usercustomize.py", "_sysconfigdata_*")
_VALIDATION_ONE_IN = 10

_BUILDER_OF_SUFFIX = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


class Document(NamedTuple):
    """One text and its name (for a file its path below the corpus folder, with forward slashes)."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Named documents in a training and a validation part.

    Attributes:
        source: Description of the documents, for users and result files.
        train: Training documents, sorted by name.
        validation: Validation documents, sorted by name; none of them is in `train`.
        skipped: Names of the files that could not be read or are not UTF-8.
    """

    source: str
    train: tuple[Document, ...]
    validation: tuple[Document, ...]
    skipped: tuple[str, ...] = ()

    def documents(self, split: str) -> tuple[Document, ...]:
        """Documents of `split`, "train" or "validation"; anything else is a ValueError."""
        if split == "train":
            return self.train
        if split == "validation":
            return self.validation
        raise ValueError(f"split is {split!r}, but a corpus has the splits 'train' and 'validation'")

    def texts(self, split: str) -> list[str]:
        """Texts of `split`, "train" or "validation", in the order of the documents' names."""
        return [document.text for document in self.documents(split)]

    @cached_property
    def sizes(self) -> str:
        """One line: number of files and bytes of each split, and how many files were skipped."""
        parts = []
        for split in ("train", "validation"):
            size = sum(len(text.encode()) for text in self.texts(split))
            parts.append(f"{split} {len(self.documents(split))} files, {size} bytes")
        parts.append(f"{len(self.skipped)} files skipped as unreadable or not UTF-8")
        return "; ".join(parts)


def standard_library_corpus(folder: str | Path | None = None) -> Corpus:
    """The source files of the Python standard library, split by file; the same for the same Python version.

    About one file in ten is validation, chosen by a hash of its path, so a file never changes its split. Third-party
    packages, tests, empty files and files written by a build or an administrator are left out.

    Args:
        folder: Read the .py files below this folder instead of the library of the running Python.

    Raises:
        ValueError: if there is no .py file with text, or a split would be empty.
    """
    root = Path(sysconfig.get_path("stdlib") if folder is None else folder)
    train: list[Document] = []
    validation: list[Document] = []
    skipped: list[str] = []
    for path in _source_files(root):
        name = path.relative_to(root).as_posix()
        try:
            text = path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError):
            skipped.append(name)
            continue
        if text:
            (validation if _is_validation(name) else train).append(Document(name, text))
    if not train or not validation:
        raise ValueError(
            f"{root} gives {len(train)} training and {len(validation)} validation files "
            f"({len(skipped)} skipped as unreadable or not UTF-8), but each split needs one; "
            "this Python may ship without sources: give another folder, or your own files to load_texts"
        )
    library = f"Python {platform.python_version()} standard library"
    source = library if folder is None else f"Python files of {root}"
    return Corpus(source, tuple(train), tuple(validation), tuple(skipped))


def _source_files(root: Path) -> list[Path]:
    sources = []
    for parent, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not _matches(name, _SKIPPED_FOLDERS)]
        sources += [
            Path(parent, name) for name in files if name.endswith(".py") and not _matches(name, _SKIPPED_FILES)
        ]
    return sorted(sources, key=lambda path: path.relative_to(root).as_posix())


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_validation(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % _VALIDATION_ONE_IN == 0


def load_texts(path_or_name: str | Path, split: str = "train", text_column: str = "text") -> list[str]:
    """Texts of a dataset, one per row, read by the `datasets` library.

    Args:
        path_or_name: A .txt, .jsonl, .json or .parquet file, a folder of such files or a pattern such as
            "texts/*.txt" (of several kinds, too), a folder written by `save_to_disk`, or (if no such file or folder
            exists) the name of a dataset on the Hub. A .txt file is one text; its line ends are read as "\\n".
        split: A split, or slices of it such as "train[:90%]" and "train[90%:]", of each kind of file. A single file,
            the files of a pattern and a single `Dataset` saved to disk are the split "train".
        text_column: The column that holds the text; "text" for a .txt file, unless there are files of other kinds.

    Raises:
        ValueError: for data that are missing or cannot be read, a column that is not text, a row without text, and
            data without text.
    """
    read = _reader(path_or_name, split)
    try:
        parts = read()
    # `datasets` raises StopIteration for empty JSON, and ArrowInvalid, a ValueError, for bad Parquet.
    except (datasets.exceptions.DatasetsError, OSError, StopIteration, ValueError) as error:
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        raise ValueError(
            f"cannot read split {split!r} of {str(path_or_name)!r}: {type(cause).__name__}: {cause}; "
            "give an existing file or folder that has data in this split, or the name of a Hub dataset"
        ) from error
    texts: list[str] = []
    for dataset in parts:
        column = "text" if len(parts) > 1 and dataset.column_names == ["text"] else text_column
        if column not in dataset.column_names:
            remedy = "choose one (text_column, --text-column)"
            if chats := sorted({"messages", "conversations"} & set(dataset.column_names)):
                remedy = (
                    f"chats ({chats[0]}) need a chat template and its special tokens: train on them with "
                    "combine(StatePassingTrainer, SFTTrainer), docs/with_trl.md"
                )
            raise ValueError(
                f"{str(path_or_name)!r} has no column {column!r}; its columns are {dataset.column_names}; {remedy}"
            )
        texts += dataset[column]
    wrong = [row for row, text in enumerate(texts) if not isinstance(text, str)]
    if wrong or not any(texts):
        what = f"row {wrong[0]} is {texts[wrong[0]]!r:.40}" if wrong else f"its {len(texts)} rows are empty"
        raise ValueError(
            f"column {text_column!r} of {str(path_or_name)!r} must hold texts, but {what}; choose the text column or "
            "the split, or remove such rows"
        )
    return texts


def split_names(path_or_name: str | Path) -> list[str]:
    """The splits of a dataset (see `load_texts`); none if it cannot be read, for which `load_texts` has the reason."""
    path = Path(path_or_name).expanduser()
    if path.is_file() or _matching(path):
        return ["train"]
    if _is_missing(path_or_name):
        return []
    try:
        if _is_saved(path):
            return list(_saved_splits(path))
        has_texts = path.is_dir() and any(path.rglob("*.txt"))
        return list(_files_of_splits(path) if has_texts else datasets.get_dataset_split_names(str(path)))
    except (datasets.exceptions.DatasetsError, OSError, StopIteration, ValueError):
        return []


def _reader(path_or_name: str | Path, split: str) -> Callable[[], list[datasets.Dataset]]:
    path = Path(path_or_name).expanduser()
    if files := [str(path)] if path.is_file() else _matching(path):
        unknown = [file for file in files if Path(file).suffix not in _BUILDER_OF_SUFFIX]
        if unknown:
            raise ValueError(f"{unknown[0]} cannot be read; files may end in {', '.join(_BUILDER_OF_SUFFIX)}")
        return partial(_read_files, {"train": files}, split)
    if path.is_dir() and _is_saved(path):
        return lambda: [_saved_split(path, split)]
    if path.is_dir() and any(path.rglob("*.txt")):
        # `datasets` would read only the most common kind, and without `sample_by` single lines of text files.
        return lambda: _read_files(_files_of_splits(path), split)
    if _is_missing(path_or_name):
        raise ValueError(f"there is no file or folder {path}; give an existing one, or the name of a Hub dataset")
    return lambda: [datasets.load_dataset(str(path), split=split)]


def _matching(pattern: Path) -> list[str]:
    """The files that match a pattern; none for a path without wildcards."""
    if not glob.has_magic(str(pattern)):
        return []
    return sorted(name for name in glob.glob(str(pattern), recursive=True) if os.path.isfile(name))


def _files_of_splits(folder: Path) -> dict[str, list[str]]:
    """The files of each split of a folder, as `datasets` finds them by their names."""
    patterns = datasets.data_files.get_data_patterns(str(folder))
    patterns_by_split = datasets.data_files.DataFilesDict.from_patterns(patterns, base_path=str(folder))
    return {str(split): list(files) for split, files in patterns_by_split.items()}


def _read_files(splits: dict[str, list[str]], split: str) -> list[datasets.Dataset]:
    """A split, or slices of it, one dataset for each kind of file; the files of each split may be of several kinds."""
    suffixes = {Path(name).suffix for files in splits.values() for name in files}
    kinds = {_BUILDER_OF_SUFFIX[suffix] for suffix in suffixes & _BUILDER_OF_SUFFIX.keys()}
    named = {part.partition("[")[0].strip() for part in split.split("+")}
    loaded = []
    for kind in sorted(kinds):
        own = {
            each: [glob.escape(name) for name in files if _BUILDER_OF_SUFFIX.get(Path(name).suffix) == kind]
            for each, files in splits.items()
        }
        own = {each: files for each, files in own.items() if files}
        if len(kinds) > 1 and named & own.keys() and named - own.keys():
            raise ValueError(f"its {kind} files have no split {min(named - own.keys())!r}, which {split!r} names, too")
        if named <= own.keys() or len(kinds) == 1:  # `datasets` says what is wrong with the split of a single kind
            options = {"sample_by": "document"} if kind == "text" else {}
            loaded.append(datasets.load_dataset(kind, data_files=own, split=split, **options))
    if not loaded:
        raise ValueError(f"no kind of file has the split {split!r}; there are {sorted(splits)}")
    return loaded


def _is_missing(path_or_name: str | Path) -> bool:
    """Whether this can only name a file or folder here, and there is none."""
    path = Path(path_or_name).expanduser()
    local = (
        glob.has_magic(str(path))
        or path.is_absolute()
        or str(path_or_name).startswith(".")
        or path.suffix in _BUILDER_OF_SUFFIX
    )
    return local and not path.is_file() and not path.is_dir()


def _is_saved(path: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _saved_splits(path: Path) -> datasets.DatasetDict:
    saved = datasets.load_from_disk(path)
    return saved if isinstance(saved, datasets.DatasetDict) else datasets.DatasetDict(train=saved)


def _saved_split(path: Path, split: str) -> datasets.Dataset:
    splits = _saved_splits(path)
    # `load_from_disk` takes no slices of splits; this reads them as `load_dataset` does.
    parts = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(part) for name, part in splits.items()})
    selected = []
    for part in parts:
        rows = splits[part.splitname]
        selected.append(rows.select(range(*slice(part.from_, part.to).indices(len(rows)))))
    return datasets.concatenate_datasets(selected)
