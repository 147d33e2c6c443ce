"""Training and evaluation data from text: corpora or files -> one token stream -> blocks, chunks or sequences."""

from .chunks import sequence_shard
from .collating import PaddingCollator
from .continued import ChunkKey, ContinuedChunks, StreamRowSampler, keep_long_documents
from .corpora import (
    Corpus,
    Document,
    load_rows,
    load_texts,
    rest_of,
    split_names,
    splits_overlap,
    standard_library_corpus,
)
from .examples import LabelledExamples
from .packing import IGNORED_LABEL, PackedBlocks, evaluation_sequences
from .tokens import byte_tokenizer, token_stream

__all__ = [
    "IGNORED_LABEL",
    "ChunkKey",
    "ContinuedChunks",
    "Corpus",
    "Document",
    "LabelledExamples",
    "PackedBlocks",
    "PaddingCollator",
    "StreamRowSampler",
    "byte_tokenizer",
    "evaluation_sequences",
    "keep_long_documents",
    "load_rows",
    "load_texts",
    "rest_of",
    "sequence_shard",
    "split_names",
    "splits_overlap",
    "standard_library_corpus",
    "token_stream",
]
