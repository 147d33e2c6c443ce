"""Fine-tune a Transformer with RoPE scaling and LoRA under the output alignment loss (Du et al., 2025, 5.1 to 5.3).

    python -m hf_recurrent_lengthgen.recipes.align_llama alignment/llama_interpolation.yaml --data my-texts

The result is a checkpoint of Transformers with merged adapters and the scaling in its config.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, set_seed
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_recurrent_lengthgen.data import PackedBlocks, load_texts, token_stream
from hf_recurrent_lengthgen.trainers import AlignmentConfig, AlignmentTrainer
from hf_recurrent_lengthgen.trainers.alignment_loss import largest_extra
from hf_recurrent_lengthgen.trainers.checkpoints import newest_complete_checkpoint

RESUME = "--resume_from_checkpoint true"


@dataclass
class LlamaArguments:
    """Model, data, RoPE scaling and adapters of a run."""

    model: str = field(metadata={"help": "Checkpoint of Transformers, folder or Hub name."})
    data: str = field(metadata={"help": "Training text, as for lengthgen train."})
    split: str = field(default="train", metadata={"help": "Split of the data."})
    text_column: str = field(default="text", metadata={"help": "Column that holds the text."})
    training_length: int = field(default=4096, metadata={"help": "Training length T in tokens."})
    rope_type: str = field(
        default="default",
        metadata={"help": "As in Transformers: linear is position interpolation; yarn, dynamic, ..."},
    )
    rope_factor: float | None = field(
        default=None, metadata={"help": "Factor of the context length; not with rope_type default."}
    )
    rope_theta: float | None = field(default=None, metadata={"help": "Base of RoPE. Default: the model's."})
    lora_rank: int = field(default=8, metadata={"help": "Rank of the adapters."})
    lora_alpha: int = field(default=16, metadata={"help": "The scale of the adapters is lora_alpha / lora_rank."})
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"],
        metadata={"help": "Linear layers with adapters."},
    )


def scaled_config(settings: LlamaArguments) -> Any:
    """The model's config with its RoPE scaled.

    Raises:
        ValueError: for a model without RoPE, a factor that is missing or unused, and, with yarn, a factor that does
            not reach the training length.
    """
    config, factor = AutoConfig.from_pretrained(settings.model), settings.rope_factor
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        raise ValueError(f"{settings.model} ({config.model_type}) has no rope_parameters to scale: give a Llama.")
    if (factor is None) != (settings.rope_type == "default"):
        raise ValueError(
            f"rope_factor goes with a rope_type other than default, got {factor} and {settings.rope_type!r}."
        )
    scaled = {"rope_type": settings.rope_type, "rope_theta": settings.rope_theta or rope["rope_theta"]}
    before = config.max_position_embeddings
    if factor is not None:
        scaled |= {"factor": factor, "original_max_position_embeddings": before}
    longest = max(before, settings.training_length)
    if factor is not None and settings.rope_type == "yarn":
        longest = int(factor * before)  # Transformers requires the factor to be the ratio of the two lengths
        if longest < settings.training_length:
            raise ValueError(
                f"rope_factor {factor:g} extends {before} positions to {longest}, fewer than training_length "
                f"{settings.training_length}: give a larger factor or shorter blocks."
            )
    config.rope_parameters = scaled
    config.max_position_embeddings = longest
    return config


def align(settings: LlamaArguments, training: AlignmentConfig) -> AlignmentTrainer:
    """Train, and save the merged model and its tokenizer to `training.output_dir`.

    Raises:
        ValueError: for an output_dir with checkpoints of another run, and as in `scaled_config`.
    """
    output, given = str(training.output_dir), training.resume_from_checkpoint
    resume = {"true": True, "false": None}.get(str(given).lower(), given)
    if any(Path(output).glob(f"{PREFIX_CHECKPOINT_DIR}-*")) and not resume:
        raise ValueError(
            f"{output} holds checkpoints of an earlier run: continue it with {RESUME}, give another output_dir, or "
            "remove them."
        )
    set_seed(training.seed)
    config = scaled_config(settings)
    dtype = torch.bfloat16 if training.bf16 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(settings.model, config=config, dtype=dtype)
    if training.gradient_checkpointing:
        model.enable_input_require_grads()  # the frozen embeddings come first
    lora = LoraConfig(
        r=settings.lora_rank, lora_alpha=settings.lora_alpha, target_modules=settings.lora_target_modules
    )
    adapted: Any = get_peft_model(model, lora)
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    extra = 0
    if training.alignment_alpha:
        training.alignment_length = training.alignment_length or settings.training_length
        extra = training.alignment_max_extra or largest_extra(training.alignment_length)
    stream = token_stream(load_texts(settings.data, settings.split, settings.text_column), tokenizer)
    # a block of n predictions has n + 1 tokens
    blocks = PackedBlocks(stream, settings.training_length + max(extra - 1, 0))
    trainer = AlignmentTrainer(adapted, training, train_dataset=blocks)
    trainer.train(resume_from_checkpoint=resume)
    if trainer.is_world_process_zero():
        adapted.merge_and_unload().save_pretrained(output)
        tokenizer.save_pretrained(output)
    trainer.save_state()
    return trainer


def read(arguments: Sequence[str]) -> tuple[LlamaArguments, AlignmentConfig]:
    """Options of a YAML file, the first argument, overridden by flags; a `ValueError` for a file without options."""
    values = yaml.load(Path(arguments[0]).read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    if not isinstance(values, dict):
        raise ValueError(f"{arguments[0]} must hold options as 'option: value' lines.")
    flags = []
    for key, value in values.items():
        parts = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        flags += [f"--{key}", *parts]
    parser = HfArgumentParser((LlamaArguments, AlignmentConfig))  # type: ignore[arg-type]
    parser.set_defaults(report_to="none", logging_steps=10)
    settings, training = parser.parse_args_into_dataclasses([*flags, *arguments[1:]])
    return settings, training


def run(arguments: Sequence[str]) -> int:
    settings, training = read(arguments)
    try:
        align(settings, training)
    except KeyboardInterrupt:
        if training.process_index == 0 and newest_complete_checkpoint(str(training.output_dir)) is not None:
            print(f"To continue, repeat the command with {RESUME}.", flush=True)
        return 130
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(f"usage: python -m {__spec__.name} CONFIG.yaml [--OPTION VALUE ...]")
    try:
        sys.exit(run(sys.argv[1:]))
    except (ValueError, OSError) as error:
        sys.exit(str(error))
