"""What `lengthgen train` is to train: its options beside those of the trainer."""

# ruff: noqa: RUF009  (_option makes a field)

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from hf_recurrent_lengthgen.cli.inputs import DATA_HELP, STANDARD_LIBRARY, USUAL_SPLIT, chosen_split
from hf_recurrent_lengthgen.data.tasks import STRING_TASKS
from hf_recurrent_lengthgen.surgery.mimetic import SWITCHES
from hf_recurrent_lengthgen.trainers import INTERVENTIONS
from hf_recurrent_lengthgen.trainers.settings import check_settings

TEXT = ("text", "babilong")
TOKENS = ("text", "passkey", "babilong")
MEASURED = ("steps", "epoch")
ANY = ()


def _continuing() -> list[str]:
    """The interventions whose rows may continue one another."""
    return [name for name, trainer in INTERVENTIONS.items() if trainer.needs_continued_data is not False]


def _option(text: str, default: Any = None, **goes_with: Sequence[str] | Callable[[], Sequence[str]]) -> Any:
    """An option.

    Args:
        text: Its help.
        default: Its value if it is not given.
        goes_with: Values of other options, `ANY` for all but none and false. With others there is no such option.
    """
    return field(default=default, metadata={"help": text, "goes_with": goes_with})


@dataclass
class RunArguments:
    """What to train, on what, with which intervention.

    Raises:
        ValueError: for values out of range, and options that contradict each other.
    """

    model: str = field(
        metadata={"help": "Checkpoint folder or Hub name; or a config.json, to train from scratch. Required."}
    )
    intervention: str = _option("What is done beside plain training: ", "state_passing")  # the parser adds the names
    data: str = _option(f"Training text: {DATA_HELP}", STANDARD_LIBRARY, task=TEXT)
    split: str | None = _option(
        "Split of the data to train on. Default: train, or the only one that there is.", task=TEXT
    )
    eval_data: str | None = _option(
        "Text for eval_loss, as for data; needs eval_strategy. Default: stdlib where that is the training text. "
        "Passkeys and symbols need none, evaluation has others.",
        eval_strategy=MEASURED,
        task=TEXT,
    )
    eval_split: str | None = _option(f"Split of eval_data. Default: {USUAL_SPLIT}.", eval_strategy=MEASURED, task=TEXT)
    text_column: str = _option("Column that holds the text.", "text", task=TEXT)
    tokenizer: str | None = _option(
        'Tokenizer folder or name, or "bytes". Default: the model\'s own; bytes from scratch.', task=TOKENS
    )
    training_length: int = _option("Training length T in tokens.", 2048, task=TOKENS)
    chunks_before_reset: int = _option(
        "With tbtt: chunks of training_length after which a state is reset to zero; 0 for never.",
        12,
        intervention=_continuing,
    )
    reset_at_document: bool = _option(
        "With tbtt: reset states where a document begins, wherever that is in a row.", False, intervention=_continuing
    )
    minimum_document_tokens: int = _option(
        "Leave out documents with fewer tokens (arXiv:2410.07145 uses 4096).", 0, task=("text",)
    )
    task: Literal["text", "passkey", "babilong", "copying", "stack_copying", "recall", "sorting"] = _option(
        "What a row is: text; passkey, a prompt; babilong, a question of bAbI hidden in the text of data; or random "
        "symbols (arXiv:2410.11135): copying, stack_copying (from the last to the first), recall (of values by their "
        "keys) or sorting. In all but the first only the answer is scored.",
        "text",
    )
    task_length: str = _option(
        'How many symbols there are (with recall, pairs), or a range such as "50-100".', "50", task=STRING_TASKS
    )
    task_vocabulary: int | None = _option(
        "How many symbols there are to choose from. The model's vocab_size must be 3 more. Default: 26 for copying, "
        "512 for recall (keys and values) and sorting.",
        task=STRING_TASKS,
    )
    task_files: str | None = _option(
        "Required: the folder of bAbI's files qa1_..._train.txt to qa10, and ..._test.txt for evaluation.",
        task=("babilong",),
    )
    task_style: str | None = _option(
        '"pass key" (prompt of arXiv:2507.02782, default), "passkey" (2410.07145) or "infinity-bench" (2509.22630).',
        task=("passkey",),
    )
    mimetic: bool = _option(
        "Mimetic initialization (arXiv:2410.11135) before training Mamba or GLA from scratch.", False
    )
    mimetic_switches: list[str] | None = _option(
        "Its parts: a (decays near 1), delta (steps near 1), bc (correlated B and C), conv (identity). Default: the "
        "paper's, all but conv in Mamba-1 and all in Mamba-2; in GLA all, which has no delta.",
        mimetic=ANY,
    )
    mimetic_layers: list[int] | None = _option("Its layers, counted from 0 (default: all).", mimetic=ANY)
    mimetic_c: float = _option("Its c: A_n = -n^-c. The paper uses 2, 4 and 8.", 8.0, mimetic=ANY)
    mimetic_offset: int = _option(
        "Its n counts from 1 + offset; a head, state or key at n = 1 decays.", 0, mimetic=ANY
    )
    lora_r: int | None = _option(
        "Train an adapter (LoRA of PEFT) of this rank and leave the weights of the model alone; lengthgen merge makes "
        "a checkpoint of both. Default: all weights are trained, or the adapter that the model is."
    )
    lora_alpha: int | None = _option(
        "Its scale: the adapter counts alpha / rank. Default: twice the rank.", lora_r=ANY
    )
    lora_target_modules: list[str] | None = _option(
        "Names of the linear layers that it changes. Default: those of the family's mixers; in hybrids those of all "
        "layers, where PEFT takes them.",
        lora_r=ANY,
    )
    trust_remote_code: bool = _option("Run the code that a checkpoint carries.", False)
    resume: bool = _option("Continue from the newest complete checkpoint in output_dir.", False)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.intervention not in INTERVENTIONS:
            raise ValueError(f"intervention must be one of {', '.join(INTERVENTIONS)}, got {self.intervention!r}.")
        if empty := [item.name for item in fields(self) if getattr(self, item.name) == ""]:
            raise ValueError(f"{empty[0]} is empty: give a value, or leave it out.")
        if self.task == "babilong" and self.task_files is None:
            raise ValueError("task babilong needs task_files, the folder of bAbI's files.")
        if self.text_column != "text" and not {self.data, self.eval_data} - {STANDARD_LIBRARY, None}:
            raise ValueError(f"text_column does nothing here: it goes with data other than {STANDARD_LIBRARY}.")
        if self.lora_r is not None and self.from_scratch:
            raise ValueError("lora_r trains an adapter beside weights that are kept: give a checkpoint as model.")
        if self.mimetic and not self.from_scratch:
            raise ValueError("mimetic overwrites trained weights: give a config.json as model, not a checkpoint.")

    @property
    def from_scratch(self) -> bool:
        """Whether the model is made of a config.json, with random weights."""
        return self.model.endswith(".json")

    @property
    def chosen_split(self) -> str:
        """The split to train on."""
        return chosen_split(self.data, self.split, "train")

    @property
    def chosen_eval_split(self) -> str:
        """The split to evaluate on."""
        return chosen_split(self.eval_data or STANDARD_LIBRARY, self.eval_split, "validation")

    @property
    def mimetic_choice(self) -> dict[str, bool]:
        """The switches of `mimetic_initialization` that are given; empty for its defaults.

        Raises:
            ValueError: for a switch that there is not.
        """
        given = self.mimetic_switches
        if unknown := sorted(set(given or ()) - set(SWITCHES)):
            raise ValueError(f"mimetic_switches must be some of {' '.join(SWITCHES)}, got {' '.join(unknown)}.")
        return {} if given is None else {name: name in given for name in SWITCHES}

    @property
    def of_symbols(self) -> bool:
        """Whether the task is one on random symbols, which needs neither text nor a tokenizer."""
        return self.task in STRING_TASKS


def chosen(condition: Sequence[str] | Callable[[], Sequence[str]]) -> Sequence[str]:
    """The values of a condition."""
    return condition() if callable(condition) else condition


def goes_with(name: str) -> str:
    """The values of other options that an option goes with, in words; "" for all, or where there is no such option."""
    for item in fields(RunArguments):
        if item.name == name:
            pairs = item.metadata.get("goes_with", {}).items()
            return " and ".join(f"{key} {' or '.join(chosen(values))}".strip() for key, values in pairs)
    having = [key for key, trainer in INTERVENTIONS.items() if name in trainer.config_class.method_fields()]
    return "" if len(having) in (0, len(INTERVENTIONS)) else f"intervention {' or '.join(sorted(having))}"
