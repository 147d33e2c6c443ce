"""One model on checked token ids, which every metric is computed from."""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

from hf_recurrent_lengthgen.evaluation.json_schema import Document, to_json
from hf_recurrent_lengthgen.evaluation.provenance import foreign_code, model_record, token_digest
from hf_recurrent_lengthgen.evaluation.readers import reader_of
from hf_recurrent_lengthgen.evaluation.result_cache import ResultCache
from hf_recurrent_lengthgen.evaluation.results import DataRecord
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.evaluation.statistics import check_training_length
from hf_recurrent_lengthgen.evaluation.streaming import Tokens, check_tokens


class Measurement:
    """A model, tokens (S, L + 1) and settings; results are cached by `key`, which holds everything they depend on.

    `evaluation` is set by `metrics.context_harm.measure.evaluated`, None before.
    """

    def __init__(
        self,
        model: nn.Module,
        tokens: Tokens,
        training_length: int,
        label: str,
        data: DataRecord,
        settings: EvaluationSettings,
        cache: ResultCache | None,
    ) -> None:
        check_training_length(training_length)
        self.model, self.training_length, self.label = model, training_length, label
        self.settings, self.cache = settings, cache
        self.reader = reader_of(model)
        self.tokens = check_tokens(tokens, self.reader.vocabulary, training_length + 1)
        self.length = self.tokens.shape[1] - 1
        self.data = dataclasses.replace(data, digest=token_digest(self.tokens))
        self.key: dict[str, Any] = {
            "model": model_record(model),
            "tokens": self.data.digest,
            "training_length": training_length,
            "confidence": settings.confidence,
            "forward_sizes": [settings.batch_size, settings.chunk_length],
        }
        self.evaluation: Any = None

    def kept(self, name: str, kind: type[Document], compute: Callable[[], Document], **depends_on: Any) -> Document:
        """A result from the cache, or computed and stored; depends on `key`, `depends_on` and the code of `kind`."""
        if self.cache is None:
            return compute()
        key = {"result": name, "kind": foreign_code([kind]), **self.key, **depends_on}
        result: Document | None = self.cache.get(key, kind)
        if result is None:
            result = compute()
            self.cache.put(key, to_json(result))
        return result
