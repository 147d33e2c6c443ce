"""The options of `lengthgen train` that no trainer config has: the model, the data, the intervention."""

# ruff: noqa: RUF009  (these functions make fields)

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from functools import partial
from typing import Any, Literal

from hf_recurrent_lengthgen.cli.inputs import chosen_split
from hf_recurrent_lengthgen.cli.shared_options import HOW, SHARED, STANDARD_LIBRARY, help_of
from hf_recurrent_lengthgen.data import split_names
from hf_recurrent_lengthgen.data.tasks import STRING_TASKS
from hf_recurrent_lengthgen.surgery.mimetic import SWITCHES
from hf_recurrent_lengthgen.trainers import INTERVENTIONS
from hf_recurrent_lengthgen.trainers.settings import check_settings

TEXT = ("text", "keys", "babilong")
DATA = (*TEXT, "examples")
PROMPTS = ("passkey", "keys", "babilong", "examples")
TOKENS = ("text", *PROMPTS)
Tasks = Literal["text", "passkey", "keys", "babilong", "examples", "copying", "stack_copying", "recall", "sorting"]
MEASURED = ("steps", "epoch")
WITH_TBTT = ("tbtt", "mixed", "statex")
ANY = ()
USUAL_LENGTH = 2048
"""Training length in tokens where neither a person nor a config names one."""


def _option(
    heading: str, text: str, default: Any = None, metavar: str | None = None, **goes_with: Sequence[str]
) -> Any:
    """An option, its help and where the help lists it; `metavar` None stands for a word for its type.

    `goes_with` are values of other options, `ANY` for all but none and false, without which it has no effect.
    """
    shown = {"heading": heading, "help": text, "goes_with": goes_with, **({"metavar": metavar} if metavar else {})}
    return field(default=default, metadata=shown)


_of_model, _of_data, _of_method, _of_run = (
    partial(_option, heading) for heading in ("model", "data", "method", "run")
)


def _shared(name: str, default: Any = None, **goes_with: Sequence[str]) -> Any:
    """An option that other commands have, too."""
    heading = next(heading for heading, options in SHARED.items() if name in options)
    return _option(heading, HOW[name]["help"], default, HOW[name].get("metavar"), **goes_with)


@dataclass
class RunArguments:
    """What to train, on what data, with which intervention.

    Raises:
        ValueError: for values out of range, and options that contradict each other.
    """

    model: str = _of_model(
        "required: checkpoint folder or Hub name, or a config.json to train from scratch", MISSING, "MODEL"
    )
    tokenizer: str | None = _shared("--tokenizer", task=TOKENS)
    training_length: int | None = _of_model(
        help_of("--training-length", f"from the config of the model, else {USUAL_LENGTH}")
        + "; prompts and examples are read in chunks of T by tbtt, whole by other methods (T: the longest sequence)",
        metavar="T",
        task=TOKENS,
    )
    attention_window: str | None = _shared("--attention-window")
    lora_r: int | None = _of_model(
        "train an adapter (LoRA of PEFT) of this rank and keep the weights of the model; lengthgen merge makes a "
        "checkpoint of both (default: all weights are trained, or the adapter if the model is one)"
    )
    lora_alpha: int | None = _of_model(
        "scale of the adapter: its weights count alpha / rank (default: twice the rank)", lora_r=ANY
    )
    mimetic: bool = _of_model(
        "start Mamba or GLA from mimetic initialization (Trockman et al., 2024), with a config.json", False
    )
    mimetic_switches: list[str] | None = _of_model(
        "its parts: a (decays near 1), delta (steps of 1), bc (correlated B and C), conv (identity) (default: all; in "
        "Mamba-1 all but conv)",
        mimetic=ANY,
    )
    mimetic_layers: list[int] | None = _of_model("its layers, from 0 (default: all)", mimetic=ANY)
    mimetic_c: float = _of_model("its c in A = -u^-c, from A = -u; the paper uses 2, 4 and 8", 8.0, mimetic=ANY)
    mimetic_offset: int = _of_model(
        "added to its u; without it a head, state or key with u = 1 decays", 0, mimetic=ANY
    )
    data: str = _shared("--data", STANDARD_LIBRARY, task=DATA)
    split: str | None = _of_data(help_of("--split", "train, or the only split"), metavar="NAME", task=DATA)
    text_column: str = _shared("--text-column", "text", task=TEXT)
    minimum_document_tokens: int = _of_data(
        "leave out documents with fewer tokens; Chen et al., 2024, take 4096", 0, task=("text", "keys")
    )
    task: Tasks = _of_data(
        "sequences: text; passkey, a prompt; keys, codes of names in the text of --data, and a question for one of "
        "them; babilong, a question of bAbI hidden in that text; examples, a chat (column messages of --data) or a "
        "prompt and its completion (columns prompt and completion); or random symbols (Trockman et al., 2024): "
        "copying, stack_copying (from the last to the first), recall (of values by their keys), sorting. In all but "
        "text only the answer counts in the loss",
        "text",
    )
    task_length: str | None = _of_data(
        "tokens of a prompt (default: training_length), or number of symbols (of pairs in recall; default: 50), or a "
        'range such as "50-100". Where the lengths of prompts or examples differ, similar ones make a batch, '
        "--train-sampling-strategy group_by_length, unless the method shuffles or several processes run",
        task=(*STRING_TASKS, "passkey", "keys", "babilong"),
    )
    task_vocabulary: int | None = _of_data(
        "number of different symbols; the vocab_size of the model must be 3 more (default: 26 for copying, 512 for "
        "recall, keys and values together, and sorting)",
        task=STRING_TASKS,
    )
    task_row_length: int = _of_data(
        "tokens of a sequence of several strings; Jelassi et al.: 220 (default: one string)", 0, task=STRING_TASKS
    )
    task_keys: int = _of_data("number of names with codes in a sequence; the question names one", 4, task=("keys",))
    task_values: int = _of_data("number of codes of each name; the last one counts", 1, task=("keys",))
    task_files: str | None = _of_data(
        "required: folder with the files of bAbI, qa1_..._train.txt to qa10, and qa1_..._test.txt for evaluation",
        metavar="FOLDER",
        task=("babilong",),
    )
    task_style: str = _of_data(
        'wording of the prompt: "pass key" (Buitrago Ruiz & Gu, 2025), "passkey" (Chen et al., 2024) or '
        '"infinity-bench" (Shen et al., 2025)',
        "pass key",
        task=("passkey",),
    )
    eval_data: str | None = _of_data(
        "data for eval_loss, as for --data (default: the same, if it has that split; passkeys, symbols: none)",
        metavar="DATA",
        eval_strategy=MEASURED,
        task=DATA,
    )
    eval_split: str | None = _of_data(
        HOW["--split"]["help"].replace("the data", "the text for eval_loss"),
        metavar="NAME",
        eval_strategy=MEASURED,
        task=DATA,
    )
    retrieval_lengths: list[int] | None = _of_run(
        "before training and in each evaluation, also measure the share of passkeys (of keys in --eval-data with task "
        "keys) that the model retrieves from prompts of so many tokens, at 10 depths: eval_retrieval_N, which "
        "--metric-for-best-model may name (default: none)",
        eval_strategy=MEASURED,
        task=TOKENS,
    )
    retrieval_samples: int = _of_run("prompts for each depth and length", 2, retrieval_lengths=ANY)
    retrieval_style: str = _of_run(
        "wording of the passkeys, as --task-style of lengthgen retrieve",
        "pass key",
        retrieval_lengths=ANY,
        task=tuple(task for task in TOKENS if task != "keys"),
    )
    import_file: str | None = _of_method(
        "Python file or installed module with own interventions (default: none)", metavar="MODULE"
    )
    intervention: str = _of_method("what is done in addition to plain training: ", "state_passing")  # + names
    chunks_before_reset: int = _of_method(
        "in tbtt: chunks of training_length after which a state is reset to zero, 0 for never",
        12,
        intervention=WITH_TBTT,
        task=("text",),
    )
    reset_at_document: bool = _of_method(
        "in tbtt: reset states at the beginning of a document, anywhere in a sequence",
        False,
        intervention=WITH_TBTT,
        task=("text",),
    )
    resume: bool = _of_run("continue from the newest complete checkpoint in --output", False)
    trust_remote_code: bool = _shared("--trust-remote-code", False)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.of_symbols and self.task_length is None:
            self.task_length = "50"
        if self.task == "examples" and self.data == STANDARD_LIBRARY:
            raise ValueError("task examples needs data with messages, or with prompt and completion: give data.")
        if self.task == "babilong" and self.task_files is None:
            raise ValueError("task babilong needs task_files, the folder with the files of bAbI.")
        if self.from_scratch and not (self.lora_r is None and self.attention_window is None):
            raise ValueError(
                "lora_r and attention_window require trained weights: give a checkpoint as model, not a config.json."
            )
        if self.mimetic and not self.from_scratch:
            raise ValueError("mimetic overwrites trained weights: give a config.json as model, not a checkpoint.")
        if unknown := sorted(set(self.mimetic_switches or ()) - set(SWITCHES)):
            raise ValueError(f"mimetic_switches must be some of {' '.join(SWITCHES)}, got {' '.join(unknown)}.")

    @property
    def from_scratch(self) -> bool:
        """Whether the model is made from a config.json, with random weights."""
        return self.model.endswith(".json")

    @property
    def mimetic_start(self) -> dict[str, Any]:
        """The options of mimetic initialization, as they are recorded."""
        lists = {"switches": self.mimetic_switches, "layers": self.mimetic_layers}
        chosen = {name: tuple(values) for name, values in lists.items() if values is not None}
        return {"c": self.mimetic_c, "offset": self.mimetic_offset} | chosen

    @property
    def length(self) -> int:
        """The training length, which is known once the model is."""
        assert self.training_length is not None
        return self.training_length

    @property
    def sequence_lengths(self) -> list[int]:
        """The length of sequences, or its minimum and maximum: of `task_length`, else the training length."""
        return [int(bound) for bound in (self.task_length or str(self.length)).split("-")]

    @property
    def lengths_differ(self) -> bool:
        """Whether prompts or examples have several lengths."""
        return self.task == "examples" or (self.task in PROMPTS and "-" in (self.task_length or ""))

    @property
    def chosen_split(self) -> str:
        return chosen_split(self.data, self.split, "train")

    @property
    def chosen_eval_data(self) -> str:
        """The text to evaluate on.

        Raises:
            ValueError: without `eval_data`, if the training text has no validation split.
        """
        if self.eval_data is not None:
            return self.eval_data
        if self.data == STANDARD_LIBRARY or self.eval_split is not None or "validation" in split_names(self.data):
            return self.data
        raise ValueError(
            f"eval_strategy measures eval_loss on held-out text, and {self.data} has no validation split: give "
            "eval_data, or a part of the training text, such as --split 'train[:95%]' --eval-split 'train[95%:]'."
        )

    @property
    def chosen_eval_split(self) -> str:
        return chosen_split(self.chosen_eval_data, self.eval_split, "validation")

    @property
    def of_symbols(self) -> bool:
        """Whether sequences are strings of random symbols, without text and tokenizer."""
        return self.task in STRING_TASKS


def goes_with(name: str) -> str:
    """The choices that an option requires, in words; "" if there are none, or if it is unknown."""
    if own := RunArguments.__dataclass_fields__.get(name):
        pairs = own.metadata["goes_with"].items()
        return " and ".join(f"{key} {' or '.join(values)}".strip() for key, values in pairs)
    methods = [key for key, trainer in INTERVENTIONS.items() if name in trainer.config_class.method_fields()]
    return "" if len(methods) in (0, len(INTERVENTIONS)) else f"intervention {' or '.join(sorted(methods))}"
