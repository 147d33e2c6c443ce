"""Corpora: the embedded one is deterministic and disjoint, and files give their texts or a clear error."""

import hashlib
import json
import os
import sysconfig
from pathlib import Path

import datasets
import huggingface_hub
import pytest

from hf_recurrent_lengthgen.data import (
    Corpus,
    Document,
    corpora,
    load_texts,
    rest_of,
    split_names,
    splits_overlap,
    standard_library_corpus,
)


@pytest.fixture(autouse=True)
def _own_cache_and_no_network(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path_factory.mktemp("datasets_cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def library() -> Corpus:
    return standard_library_corpus()


def write_sources(folder: Path, names: list[str]) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"# {name}\r\n".encode())


def test_the_library_is_large_split_by_file_and_read_byte_by_byte(library: Corpus) -> None:
    train, validation = ({d.name for d in documents} for documents in (library.train, library.validation))
    assert not train & validation
    assert 0.05 < len(validation) / len(train | validation) < 0.2
    assert sum(map(len, library.texts("train"))) > 3_000_000
    assert {"argparse.py", "json/decoder.py"} <= train | validation
    assert list(library.train) == sorted(library.train)
    parts = {part for name in train | validation for part in name.split("/")}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages", "sitecustomize.py"}
    root = Path(sysconfig.get_path("stdlib"))
    for document in (*library.train[::50], *library.validation[::20]):
        assert document.text.encode() == (root / document.name).read_bytes()


def test_folder_walk_keeps_order_bytes_and_side_of_each_file(tmp_path: Path) -> None:
    names = [f"package{i % 3}/m{i}.py" for i in range(40)]
    write_sources(tmp_path, names)
    corpus = standard_library_corpus(tmp_path)
    expected = [n for n in sorted(names) if int(hashlib.sha256(n.encode()).hexdigest()[:16], 16) % 10 == 0]
    assert [d.name for d in corpus.validation] == expected
    assert [d.name for d in corpus.train] == [n for n in sorted(names) if n not in expected]
    assert all(d.text == f"# {d.name}\r\n" for d in (*corpus.train, *corpus.validation))
    (tmp_path / "added.py").write_text("x = 1\n")
    after = standard_library_corpus(tmp_path)
    assert set(corpus.train) <= set(after.train)
    assert set(corpus.validation) <= set(after.validation)


def test_folder_walk_leaves_out_what_differs_between_machines(tmp_path: Path) -> None:
    kept = [f"m{i}.py" for i in range(40)]
    left_out = [
        "site-packages/a.py",
        "dist-packages/a.py",
        "lib/__pycache__/a.py",
        "lib/test/a.py",
        "lib/tests/a.py",
        "idlelib/idle_test/a.py",
        "config-3.11-linux/python-config.py",
        "sitecustomize.py",
        "_sysconfigdata__linux.py",
        "notes.txt",
    ]
    write_sources(tmp_path, kept + left_out)
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    os.symlink(tmp_path / "nowhere", tmp_path / "broken.py")
    corpus = standard_library_corpus(tmp_path)
    assert sorted(d.name for d in (*corpus.train, *corpus.validation)) == sorted(kept)


def test_folder_without_sources_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 training and 0 validation files"):
        standard_library_corpus(tmp_path)


ROWS = [{"text": f"row {i} é漢", "n": i} for i in range(10)]
TEXTS = [str(row["text"]) for row in ROWS]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    table = datasets.Dataset.from_list(ROWS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    table.to_parquet(str(tmp_path / "rows.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict(train=table, test=table.select([3])).save_to_disk(str(tmp_path / "saved_splits"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.jsonl").write_text((tmp_path / "rows.jsonl").read_text())
    return tmp_path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "saved", "saved_splits", "folder"])
def test_every_source_gives_the_same_texts_and_slices(sources: Path, name: str) -> None:
    assert load_texts(sources / name) == TEXTS
    assert load_texts(str(sources / name), "train[:20%]+train[9:]") == [*TEXTS[:2], TEXTS[9]]
    assert split_names(sources / name) == (["train", "test"] if name == "saved_splits" else ["train"])
    if name == "saved_splits":
        assert load_texts(sources / name, "test") == [TEXTS[3]]


def test_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for mark in (b"", b"\xef\xbb\xbf"):  # as editors of Windows write it
        path.write_bytes(mark + "é one\r\ntwo\n\nthree\n".encode())
        assert load_texts(path) == ["é one\ntwo\n\nthree\n"]


def test_folder_of_text_files_has_one_document_per_file(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_text("one\nmore")
    (tmp_path / "2.txt").write_text("two\n")
    (tmp_path / "README.md").write_text("not data")
    assert load_texts(tmp_path) == ["one\nmore", "two\n"]


def test_splits_of_a_folder_and_a_pattern(tmp_path: Path) -> None:
    for split, names in {"train": ("a", "b"), "validation": ("c",)}.items():
        (tmp_path / split).mkdir()
        for name in names:
            (tmp_path / split / f"{name}.txt").write_text(f"{name}\nmore")
    (tmp_path / "README.md").write_text("not data")
    assert load_texts(tmp_path, "validation") == ["c\nmore"]
    assert load_texts(tmp_path, "train[:50%]") == ["a\nmore"]
    assert split_names(tmp_path) == ["train", "validation"]
    pattern = f"{tmp_path}/**/[ac].*"
    assert split_names(pattern) == ["train"]
    assert load_texts(pattern) == ["a\nmore", "c\nmore"]
    with pytest.raises(ValueError, match=r"there is no file or folder .*x\*"):
        load_texts(f"{tmp_path}/x*")


def test_a_folder_of_several_kinds_is_refused_and_files_that_describe_data_are_no_kind(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a", "b"]}).to_parquet(str(tmp_path / "a.parquet"))
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert load_texts(tmp_path) == ["a", "b"]
    for name in ("c", "d", "e"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n')
    with pytest.raises(ValueError, match=r"the files end in .jsonl, .parquet; give files of one kind"):
        load_texts(tmp_path)


def test_chats_are_refused_with_what_reads_them(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    with pytest.raises(ValueError, match=r"no column 'text'.*messages has examples.*--task examples.*combine\(State"):
        load_texts(tmp_path / "chats.jsonl")


def test_names_are_no_patterns(tmp_path: Path) -> None:
    for folder in ("b[12]", "b1"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a[12].txt").write_text(f"brackets in {folder}")
        (tmp_path / folder / "a1.txt").write_text("one")
    assert load_texts(tmp_path / "b1" / "a[12].txt") == ["brackets in b1"]
    assert load_texts(tmp_path / "b[12]") == ["one", "brackets in b[12]"]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "saved", "saved_splits"])
def test_wrong_column_and_split_errors_name_what_is_there(sources: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"no column 'body'; its columns are \['text', 'n'\]"):
        load_texts(sources / name, text_column="body")
    with pytest.raises(ValueError, match=r"column 'n' .* must hold texts, but row 0 is 0"):
        load_texts(sources / name, text_column="n")
    with pytest.raises(ValueError, match=r"Unknown split \"dev\"\. Should be one of \['train'"):
        load_texts(sources / name, "dev")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "its 1 rows are empty"),
        ("a.txt", b"\xff\xfe", "UnicodeDecodeError"),
        ("a.jsonl", b"", "cannot read split 'train' of .*: it is empty; give an existing file or folder"),
        ("a.jsonl", b"\n\n", "cannot read split 'train' of .*: it is empty; give an existing file or folder"),
        (
            "a.jsonl",
            b'{"text": \n nonsense',
            "JSON parse error.*; give JSON objects, one on each line or all in a list, in UTF-8",
        ),
        ("a.jsonl", '{"text": "a"}'.encode("utf-16"), "JSON parse error.*; give JSON objects, one on .*, in UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "f\xfcr"}\n', "Invalid UTF8 sequence at string index 1"),
        ("a.jsonl", b'{"text": "a"}\n{"text": null}\n', "must hold texts, but row 1 is None"),
        ("a.jsonl", b'{"text": ["a"]}\n', "must hold texts, but row 0 is"),
        ("a.parquet", b"PAR1", "Parquet"),
        ("a.csv", b"text\na\n", r"files end in \.csv; give files of one kind"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_texts(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_a_slice_without_rows_says_what_percents_are_of(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text("text")
    assert load_texts(tmp_path, "train[:90%]") == ["text"] * 3
    with pytest.raises(ValueError, match=r"it is empty; percents are of rows, such as the files of a folder"):
        load_texts(tmp_path, "train[90%:]")


def test_slices_of_one_text_are_of_its_characters(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("0123456789")
    for split, expected in (
        ("train", ["0123456789"]),
        ("train[:70%]", ["0123456"]),
        ("train[70%:]", ["789"]),
        ("train[20%:40%]+train[-10%:]", ["23", "9"]),
        ("train[:1]", ["0123456789"]),  # rows
    ):
        assert load_texts(book, split) == expected
    with pytest.raises(ValueError, match="empty"):
        load_texts(book, "train[100%:]")
    book.with_name("empty.txt").write_text("")
    with pytest.raises(ValueError, match="empty"):
        load_texts(book.with_name("empty.txt"), "train[:50%]")
    book.with_name("empty.txt").unlink()
    book.with_name("other.txt").write_text("ab")
    assert load_texts(tmp_path, "train[:50%]") == ["0123456789"]  # of two texts, one


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("train", "train", True),
        ("train", "validation", False),
        ("train", "train[90%:]", True),
        ("train[:90%]", "train[90%:]", False),
        ("train[:80%]", "train[60%:]", True),
        ("train[:10]", "train[10:20]", False),
        ("train[:30%]+train[70%:]", "train[30%:70%]", False),
        ("train[:30%]+train[70%:]", "train[60%:80%]", True),
        ("train+validation", "validation", True),
        ("train+validation[:50%]", "validation[50%:]", False),
        ("train[:1000]", "train[50%:]", True),
        ("train[-5:]", "train[:100]", True),
        ("train[-10%:]", "train[:90%]", False),
    ],
)
def test_which_splits_overlap(one: str, other: str, expected: bool) -> None:
    assert splits_overlap(one, other) == splits_overlap(other, one) == expected


@pytest.mark.parametrize(
    ("split", "rest"),
    [
        ("train[:90%]", "train[90%:]"),
        ("test[90%:]", "test[:90%]"),
        ("train[-10%:]", "train[:90%]"),
        ("train[:1000]", "train[1000:]"),
        ("train[5:]", "train[:5]"),
        *((split, None) for split in ("train", "train[:100%]", "train[10%:90%]", "train[:9]+test", "train[-5:]", "")),
    ],
)
def test_the_rest_of_a_split(split: str, rest: str | None) -> None:
    assert rest_of(split) == rest
    assert rest is None or not splits_overlap(split, rest)


def test_slices_of_several_splits(tmp_path: Path) -> None:
    for name in ("train", "validation"):
        (tmp_path / f"{name}.txt").write_text(f"{name[0]}123456789")
    assert load_texts(tmp_path, "train[:70%]+validation[70%:]") == ["t123456", "789"]
    assert load_texts(tmp_path, "train+validation[:20%]") == ["t123456789", "v1"]
    corpus = Corpus("", tuple(Document(name, name) for name in "abcde"), (Document("f", "f"),))
    assert corpus.texts("train[:40%]") == ["a", "b"]
    assert corpus.texts("train[80%:]+validation") == ["e", "f"]
    with pytest.raises(ValueError, match="no split 'test'; give one of train, validation"):
        corpus.texts("test")


def test_a_folder_without_texts_names_the_files_that_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("a")
    with pytest.raises(ValueError, match=r"none of its files can be read; give files \.txt"):
        load_texts(tmp_path)


def test_missing_sources_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[str] = []
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name: requested.append(name) or ["train"])
    for missing in (tmp_path / "a.txt", tmp_path / "folder", "relative/a.jsonl"):
        assert split_names(missing) == []
        with pytest.raises(ValueError, match="no file or folder"):
            load_texts(missing)
    assert not requested  # the Hub, which retries for long without a network
    monkeypatch.setattr(corpora, "is_out_of_reach", lambda *_: True)
    assert split_names("nothing") == []
    with pytest.raises(ValueError, match=r"no file or folder 'nothing', no dataset .* the Hub cannot be reached"):
        load_texts("nothing")
    assert not requested
    monkeypatch.setattr(corpora, "is_out_of_reach", lambda *_: False)
    assert split_names("nobody/nothing") == ["train"]
    with pytest.raises(ValueError, match="cannot read split 'train' of 'nobody/nothing'"):
        load_texts("nobody/nothing")
    with pytest.raises(ValueError, match="cannot read split"):
        load_texts(tmp_path)
