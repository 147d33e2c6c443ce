"""Settings that every method shares."""

from dataclasses import MISSING, dataclass, fields
from functools import cache
from inspect import get_annotations
from typing import Any, Literal, Self

from transformers import TrainingArguments

from hf_recurrent_lengthgen.evaluation.settings import option
from hf_recurrent_lengthgen.trainers.settings import check_settings


@dataclass
class InitialStateConfig(TrainingArguments):
    """`TrainingArguments` and the settings that every method shares.

    Raises:
        ValueError: for values out of range and for options that cannot be combined.
    """

    # Parameters that control output alignment
    alignment_alpha: float = option(
        0.0,
        "Weight alpha of the output alignment loss (Du et al., 2025, Eq. 4). In the paper, 0.1 to 0.3 "
        "helps; 0.5 or more hurts. Default 0: off.",
    )
    alignment_length: int | None = option(
        None,
        "Length T, in tokens, of the two crops that are aligned. Sequences must hold T + alignment_max_extra "
        "tokens. Default: the largest even T that the sequences allow, about two thirds of their length.",
    )
    alignment_min_extra: int = option(1, "Smallest shift l_extra between the two crops, in tokens. Default 1.")
    alignment_max_extra: int | None = option(
        None,
        "Largest shift l_extra between the two crops, in tokens. Default: T/2, but at most T - "
        "alignment_min_context - 1, which leaves one aligned token.",
    )
    alignment_min_context: int | None = option(
        None,
        "Number of tokens that an aligned token has before it in both crops, at least. Default: T/2, as in the "
        "paper's listing (appendix D); 0 aligns all common tokens, as in its section 4.2.",
    )
    alignment_divergence: Literal["sce", "jeffreys"] = option(
        "sce",
        "Divergence of aligned tokens: the paper's symmetric cross-entropy (sce), or Jeffreys (jeffreys, "
        "ours), which is sce without its entropies. Default: sce.",
    )
    alignment_second_state: Literal["same", "zero"] = option(
        "same", "Initial state of the second crop: that of the first (same), or zero (ours). Default: same."
    )

    # Parameters that control attention
    attention_windows: list[int] | None = option(
        None,
        "Attention windows in tokens of a hybrid; each training step draws one (SWAX, Cabannes et al., 2025), so "
        "recurrent layers learn to remember what attention does not see. Evaluation and checkpoints use the "
        "model's own window. Default: always the model's own window.",
    )

    # Parameters that control backpropagation through chunks
    bptt_chunk_length: int | None = option(
        None,
        "Process each sequence in chunks of this many tokens and recompute their activations in the backward pass: "
        "sequences may be longer than memory allows, and gradients through the state stay exact. The evaluation "
        "loss uses the same chunks. Default: no chunks.",
    )
    bptt_window: int | None = option(
        None,
        "Number of chunks in a group; the groups are counted from the end of the sequence. The gradient through the "
        "state flows within a group only. Each group has its own backward pass; groups without labels run forward "
        "only. Default: all chunks are one group; 1 for TBTT on long examples.",
    )

    # Parameters that control how processes split sequences
    context_parallel_size: int = option(
        1, "Number of processes that split each sequence among them; must divide the number of processes. Default 1."
    )

    def __post_init__(self) -> None:
        check_settings(self, self.method_fields())
        self.check()
        super().__post_init__()

    def check(self) -> None:
        """Check combinations of settings, after the type and range of each; methods extend it."""
        if self.bptt_window is not None and self.bptt_chunk_length is None:
            raise ValueError("bptt_window counts chunks, so it needs bptt_chunk_length: set it, too.")
        if self.bptt_chunk_length is not None and self.alignment_alpha:
            raise ValueError("bptt_chunk_length keeps no logits, which alignment_alpha needs: set only one of them.")
        if self.neftune_noise_alpha and (self.bptt_chunk_length is not None or self.context_parallel_size > 1):
            raise ValueError(
                "neftune_noise_alpha scales noise by the length of sequences, but with bptt_chunk_length or "
                "context_parallel_size the model gets parts of them, with larger noise: set only one of them."
            )
        if self.context_parallel_size > 1:
            whole = ("alignment_alpha", "bptt_chunk_length", "torch_compile")
            if wrong := [name for name in whole if getattr(self, name)]:
                raise ValueError(
                    f"context_parallel_size does not work with {wrong}: the crops of the alignment loss, chunks "
                    "and compiled graphs are those of whole sequences. Set only one of them."
                )

    @property
    def row_processes(self) -> int:
        """Number of processes, or of groups of processes that split sequences, that read different sequences."""
        return self.world_size // self.context_parallel_size

    @property
    def row_process_index(self) -> int:
        """Number of this process, or of its group, among `row_processes`."""
        return self.process_index // self.context_parallel_size

    @classmethod
    def alone(cls, **settings: Any) -> Self:
        """A config with the settings of the method only, without the set-up of a run by `TrainingArguments`."""
        made = object.__new__(cls)
        for item in fields(cls):
            vars(made)[item.name] = item.default if item.default_factory is MISSING else item.default_factory()
        vars(made).update(settings)
        check_settings(made, made.method_fields())
        made.check()
        return made

    @classmethod
    @cache
    def method_fields(cls) -> frozenset[str]:
        """Names of the settings that the method's config classes add to `TrainingArguments`."""
        stock = {item.name for item in fields(TrainingArguments)}
        classes = [base for base in cls.__mro__ if issubclass(base, InitialStateConfig)]
        return frozenset(name for base in classes for name in get_annotations(base)) - stock

    def method_settings(self) -> dict[str, Any]:
        own = self.method_fields()
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name in own}
