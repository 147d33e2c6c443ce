"""Configuration of Mamba-2 with an initial and a final state."""

from typing import Any, ClassVar

from transformers import Mamba2Config

from .scan_backends import SCAN_BACKEND_SETTINGS

CODE_FORMAT_VERSION = 1


class StatefulMamba2Config(Mamba2Config):
    """`Mamba2Config` plus what the stateful classes add.

    Args:
        scan_backend: "torch" for the plain torch scan, "kernel" for mamba-ssm and causal-conv1d, "auto" for the
            kernels on a GPU where they are installed and take the sizes and dtype, and torch elsewhere.
        training_length: Tokens per training sequence (T_train), which evaluation starts from; None if unknown.
        interventions: What was done to the model after its first training, in order, in words.
        code_format_version: Version of the checkpoint's code format. A checkpoint of a newer version than
            this code is refused.

    `chunk_size` is the tile of the GPU kernel; the torch scan has its own. Neither changes results.
    All other fields are those of `Mamba2Config`. Only `hidden_act="silu"` is supported.

    Raises:
        ValueError: for a newer code format, an unknown backend, an unsupported activation, or a number of
            heads that is not a multiple of `n_groups`.
    """

    model_type = "stateful_mamba2"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["final_state", "past_key_values"]

    scan_backend: str = "auto"
    training_length: int | None = None
    interventions: tuple[str, ...] | list[str] = ()
    code_format_version: int = CODE_FORMAT_VERSION

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.check()

    def check(self) -> None:
        """Refuse what the stateful classes cannot honor; models call it too: early 5.x configs have no hook."""
        if self.code_format_version > CODE_FORMAT_VERSION:
            raise ValueError(
                f"This checkpoint has code format version {self.code_format_version}, the code at hand reads up to "
                f"{CODE_FORMAT_VERSION}: update hf_recurrent_lengthgen."
            )
        if self.scan_backend not in SCAN_BACKEND_SETTINGS:
            raise ValueError(f"scan_backend must be one of {SCAN_BACKEND_SETTINGS}, got {self.scan_backend!r}.")
        if self.hidden_act not in ("silu", "swish"):
            raise ValueError(
                f'hidden_act must be "silu", got {self.hidden_act!r}: the convolution is followed by SiLU.'
            )
        if self.num_heads % self.n_groups:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of n_groups ({self.n_groups}).")
        if self.num_heads * self.head_dim != self.hidden_size * self.expand:
            raise ValueError(
                f"num_heads * head_dim ({self.num_heads} * {self.head_dim}) must be hidden_size * expand "
                f"({self.hidden_size} * {self.expand})."
            )


StatefulMamba2Config.register_for_auto_class()
