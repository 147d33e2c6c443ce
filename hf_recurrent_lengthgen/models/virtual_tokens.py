"""What prompt-learning methods of PEFT (prompt tuning, p-tuning, prefix tuning, ...) put before a text."""

from typing import Any

NO_KEYS = (
    "prefix tuning and cartridges of PEFT train keys and values before the text, which recurrent layers do not have. "
    "Train the state before the text instead (add_learned_state, LearnedStateTrainer), or virtual tokens "
    "(PromptTuningConfig, PromptEncoderConfig)"
)


GOES_ON = (
    "PEFT reads only the last token after a cache: leave the cache out and give the whole text, before which its "
    "virtual tokens are read"
)


def virtual_tokens(model: Any) -> int:
    """Number of tokens that PEFT puts before each text that the model generates from; 0 without such a method.

    `generate` of PEFT has its own `prepare_inputs_for_generation` on the model.

    Raises:
        ValueError: for a method that trains keys and values.
    """
    wrapper = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    config: Any = getattr(wrapper, "active_peft_config", None)
    if not getattr(config, "is_prompt_learning", False):
        return 0
    if config.peft_type in ("PREFIX_TUNING", "CARTRIDGE"):
        raise ValueError(f"{type(model).__name__} does not take {config.peft_type}: {NO_KEYS}.")
    return int(config.num_virtual_tokens)
