"""Sources of text: a corpus that is on every machine, and any dataset that `datasets` can read.

`standard_library_corpus()` needs no download; `load_texts()` reads files, folders and datasets of the Hub.
"""

import glob
import hashlib
import json
import os
import platform
import re
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_recurrent_lengthgen.hub_access import is_out_of_reach

if TYPE_CHECKING:
    import datasets  # takes most of a second

# Third-party code, tests (odd on purpose), and files that differ between machines with the same Python.
_SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "config-*")
_SKIPPED_FILES = ("sitecustomize.py", "usercustomize.py", "_sysconfigdata_*")
_VALIDATION_ONE_IN = 10

_BUILDER_OF_SUFFIX = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}


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
    """

    source: str
    train: tuple[Document, ...]
    validation: tuple[Document, ...]

    def texts(self, split: str) -> list[str]:
        """Texts of `split`, "train" or "validation" or slices of these, in the order of the documents' names."""
        parts = {"train": self.train, "validation": self.validation}
        if wrong := [name for name in _names_in(split) if name not in parts]:
            raise ValueError(f"there is no split {wrong[0]!r}; give one of {', '.join(parts)}, or slices of them")
        if split in parts:
            return [document.text for document in parts[split]]
        ranges = _ranges(split, {name: len(part) for name, part in parts.items()})
        return [document.text for name, start, stop in ranges for document in parts[name][start:stop]]


def standard_library_corpus(folder: str | Path | None = None) -> Corpus:
    """The source files of the Python standard library, split by file; the same for the same Python version.

    About one file in ten is validation, chosen by a hash of its path, so a file never changes its split. Third-party
    packages, tests, empty files, files that are not UTF-8 and those of a build or an administrator are left out.

    Args:
        folder: Read the .py files below this folder instead of the library of the running Python.

    Raises:
        ValueError: if there is no .py file with text, or a split would be empty.
    """
    root = Path(sysconfig.get_path("stdlib") if folder is None else folder)
    train: list[Document] = []
    validation: list[Document] = []
    for path in _source_files(root):
        name = path.relative_to(root).as_posix()
        text = ""
        with suppress(OSError, UnicodeDecodeError):
            text = path.read_bytes().decode("utf-8")
        if text:
            (validation if _is_validation(name) else train).append(Document(name, text))
    if not train or not validation:
        raise ValueError(
            f"{root} gives {len(train)} training and {len(validation)} validation files, but each split needs one: "
            "this Python may ship without sources; give another folder, or your own files to load_texts"
        )
    library = f"Python {platform.python_version()} standard library"
    source = library if folder is None else f"Python files of {root}"
    return Corpus(source, tuple(train), tuple(validation))


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


def load_rows(path_or_name: str | Path, split: str = "train") -> "datasets.Dataset":
    """The rows of a dataset, read by the `datasets` library.

    Args:
        path_or_name: A .txt, .jsonl, .json or .parquet file, a folder of files of one kind or a pattern such as
            "texts/*.txt", a folder written by `save_to_disk`, or (if no such file or folder exists) the name of a
            dataset on the Hub. A .txt file is one text; line ends are read as "\\n", without a byte order mark.
        split: A split, or slices of it such as "train[:90%]" and "train[90%:]": percents of rows, or of the characters
            of a single .txt file. A single file, the files of a pattern and a single `Dataset` saved to disk are the
            split "train".

    Raises:
        ValueError: for data that are missing or cannot be read.
    """
    import datasets

    files = _files_of_splits(path_or_name)
    try:
        name, options = _builder_of(files) if files else (str(Path(path_or_name).expanduser()), {})
        if name == "text" and "%" in split and all(len(files.get(one, ())) == 1 for one in _names_in(split)):
            rows = {one: datasets.load_dataset(name, split=one, **options)["text"] for one in _names_in(split)}
            texts = {one: "".join(texts) for one, texts in rows.items()}  # an empty file has no row
            ranges = _ranges(split, {one: len(text) for one, text in texts.items()})
            return datasets.Dataset.from_dict({"text": [texts[one][start:stop] for one, start, stop in ranges]})
        rows = datasets.load_dataset(name, split=split, **options)
        rows.data.validate(full=True)  # JSON is read whatever its encoding, and fails at the first look at a row
        return rows
    # `datasets` raises StopIteration for empty JSON, and ArrowInvalid, a ValueError, for bad Parquet.
    except (datasets.exceptions.DatasetsError, OSError, StopIteration, ValueError) as error:
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        is_empty = isinstance(cause, StopIteration) or "corresponds to no data" in str(cause)
        why = "it is empty" if is_empty else f"{type(cause).__name__}: {cause}"
        remedy = "give an existing file or folder that has data in this split, or the name of a Hub dataset"
        if isinstance(error, datasets.exceptions.DataFilesNotFoundError):
            why, remedy = "none of its files can be read", f"give files {', '.join(_BUILDER_OF_SUFFIX)}"
        if is_empty and "%" in split:
            remedy = "percents are of rows, such as the files of a folder, rounded: give rows (train[:2], train[2:])"
        if "JSON parse error" in why:
            remedy = "give JSON objects, one on each line or all in a list, in UTF-8"
        raise ValueError(f"cannot read split {split!r} of {str(path_or_name)!r}: {why}; {remedy}") from error


def load_texts(path_or_name: str | Path, split: str = "train", text_column: str = "text") -> list[str]:
    """Texts of a dataset, one per row; see `load_rows` for the other arguments.

    Args:
        text_column: The column that holds the text; "text" for a .txt file.

    Raises:
        ValueError: for data that are missing or cannot be read, a column that is not text, a row without text, and
            data without text.
    """
    dataset = load_rows(path_or_name, split)
    if text_column not in dataset.column_names:
        remedy = "choose one (text_column, --text-column)"
        if labelled := sorted({"messages", "conversations", "prompt"} & set(dataset.column_names)):
            remedy = (
                f"{labelled[0]} has examples with answers: --task examples (LabelledExamples) trains on messages, or "
                "prompt and completion; combine(StatePassingTrainer, SFTTrainer), docs/with_trl.md, on what TRL takes"
            )
        raise ValueError(
            f"{str(path_or_name)!r} has no column {text_column!r}; its columns are {dataset.column_names}; {remedy}"
        )
    texts: list[str] = list(dataset[text_column])
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
    import datasets

    try:
        path = Path(path_or_name).expanduser()
        return list(_files_of_splits(path_or_name) or datasets.get_dataset_split_names(str(path)))
    except (datasets.exceptions.DatasetsError, OSError, StopIteration, ValueError):
        return []


def splits_overlap(one: str, other: str) -> bool:
    """Whether two splits, or slices of them, have data in common; true if that depends on the number of rows."""
    if not {*_names_in(one)} & {*_names_in(other)}:
        return False
    numbers = [number for part in re.findall(r"\[(.*?)\]", one + other) for number in part.split(":") if number]
    rows = [number for number in numbers if not number.endswith("%")]
    if rows and (len(rows) < len(numbers) or any(number.startswith("-") for number in rows)):
        return True
    sizes = dict.fromkeys([*_names_in(one), *_names_in(other)], 10**9)
    pairs = product(_ranges(one, sizes), _ranges(other, sizes))
    return any(a == b and max(start, begin) < min(stop, end) for (a, start, stop), (b, begin, end) in pairs)


def rest_of(split: str) -> str | None:
    """What a slice at the beginning or the end of a split leaves of it, "train[90%:]" for "train[:90%]"; else None."""
    name, *others = _names_in(split)
    size, unit = (100, "%") if "%" in split else (10**9, "")
    if others or "[" not in split or (not unit and "-" in split):
        return None
    [(_, start, stop)] = _ranges(split, {name: size})
    if start == 0 < stop < size:
        return f"{name}[{stop}{unit}:]"
    return f"{name}[:{start}{unit}]" if 0 < start < stop == size else None


def _names_in(split: str) -> list[str]:
    """The splits that a specification of slices is of: "train" and "test" for "train[:9]+test"."""
    return [re.split(r"[\[(]", part)[0].strip() for part in split.split("+")]


def _ranges(split: str, sizes: dict[str, int]) -> list[tuple[str, int, int]]:
    """The name, start and end of each slice, of splits of these sizes; a `ValueError` if it is none."""
    from datasets import ReadInstruction

    parts = ReadInstruction.from_spec(split).to_absolute(sizes)
    return [(part.splitname, part.from_, part.to) for part in parts]


def _files_of_splits(path_or_name: str | Path) -> dict[str, list[str]]:
    """The files of each split that we choose ourselves; none for what `datasets` finds as well.

    Raises:
        ValueError: for what can only be a file or folder here, and is not there.
    """
    path = Path(path_or_name).expanduser()
    is_pattern = glob.has_magic(str(path)) and not path.exists()
    if path.is_file():
        return {"train": [str(path)]}
    if is_pattern and (names := [name for name in glob.glob(str(path), recursive=True) if os.path.isfile(name)]):
        return {"train": sorted(names)}
    if not path.is_dir():
        is_local = is_pattern or path.is_absolute() or str(path_or_name).startswith(".")
        if is_local or path.suffix in _BUILDER_OF_SUFFIX:
            raise ValueError(f"there is no file or folder {path}; give an existing one, or the name of a Hub dataset")
        from datasets import config

        name = str(path_or_name)
        folders = [folder.name for folder in Path(config.HF_DATASETS_CACHE).glob("*")]  # in snake case
        prepared = {re.sub(r"[\W_]", "", folder).lower() for folder in folders}
        if re.sub(r"[\W_]", "", name).lower() not in prepared and is_out_of_reach("datasets", name):
            raise ValueError(
                f"there is no file or folder {name!r}, no dataset of this name in the cache, and the Hub cannot be "
                "reached; give an existing file or folder, or connect to the network"
            )
        return {}
    if (path / "state.json").is_file():  # written by `save_to_disk`
        return {"train": sorted(map(str, path.glob("*.arrow")))}
    if (names_of_splits := path / "dataset_dict.json").is_file():
        splits = json.loads(names_of_splits.read_text(encoding="utf-8"))["splits"]
        return {split: sorted(map(str, (path / split).glob("*.arrow"))) for split in splits}
    kinds = {_BUILDER_OF_SUFFIX[file.suffix] for file in path.rglob("*") if file.suffix in _BUILDER_OF_SUFFIX}
    if "text" not in kinds and len(kinds) < 2:
        return {}
    from datasets import data_files

    # `datasets` would read only the most common kind, and without `sample_by` single lines of text files.
    base = glob.escape(str(path))
    by_split = data_files.DataFilesDict.from_patterns(data_files.get_data_patterns(base), base_path=base)
    ours = {
        str(split): [name for name in names if Path(name).suffix in _BUILDER_OF_SUFFIX]
        for split, names in by_split.items()
    }
    return {split: names for split, names in ours.items() if names}


def _builder_of(splits: dict[str, list[str]]) -> tuple[str, dict[str, Any]]:
    """The name of the builder of `datasets` that reads the files, and its options."""
    suffixes = {Path(name).suffix for names in splits.values() for name in names}
    kinds = {_BUILDER_OF_SUFFIX.get(suffix, "") for suffix in suffixes}
    if len(kinds) != 1 or "" in kinds:
        raise ValueError(
            f"the files end in {', '.join(sorted(suffixes))}; give files of one kind, "
            f'{", ".join(_BUILDER_OF_SUFFIX)}, in a folder or by a pattern such as "texts/*.txt"'
        )
    (kind,) = kinds
    names = {each: [glob.escape(name) for name in files] for each, files in splits.items()}
    options = {"sample_by": "document", "encoding": "utf-8-sig"} if kind == "text" else {}
    return kind, options | {"data_files": names}
