"""Text to training blocks: corpora and files -> one token stream -> packed blocks or evaluation sequences."""

from .corpora import Corpus, Document, load_texts, standard_library_corpus
from .packing import IGNORED_LABEL, PackedBlocks, evaluation_sequences
from .tokens import byte_tokenizer, token_stream

__all__ = [
    "IGNORED_LABEL",
    "Corpus",
    "Document",
    "PackedBlocks",
    "byte_tokenizer",
    "evaluation_sequences",
    "load_texts",
    "standard_library_corpus",
    "token_stream",
]
