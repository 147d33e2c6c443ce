"""Methods on trainers of TRL, with one forward pass per step from the states that the method says, and on others."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)

from hf_recurrent_lengthgen.checkpoints.records import read_lineage
from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.trainers import (
    AlignmentTrainer,
    FittedNoiseTrainer,
    LearnedStateTrainer,
    MixedStatesTrainer,
    RandomNoiseTrainer,
    StatePassingConfig,
    StatePassingTrainer,
    StateXTrainer,
    TbttConfig,
    TbttTrainer,
    ZeroStateTrainer,
    combine,
)
from tests.hybrids.tiny_models import tiny_model as tiny_hybrid
from tests.trainers import toys
from tests.versions import SINCE_5_23

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings(
    # TRL's configs still use the name that Transformers replaced by activation_checkpointing.
    "ignore:`gradient_checkpointing` is deprecated:FutureWarning",
)
disable_progress_bars()
SETTINGS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
    "per_device_train_batch_size": 2,
    "max_steps": 3,
    "learning_rate": 0.1,
    "optim": "sgd",
}
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}A: {% generation %}{{ message['content'] }}\n"
    "{% endgeneration %}{% else %}Q: {{ message['content'] }}\n{% endif %}{% endfor %}"
)


def model() -> StatefulMamba2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4, "n_groups": 1, "num_hidden_layers": 2}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return StatefulMamba2ForCausalLM(StatefulMamba2Config(vocab_size=384, **sizes, **special))


def tokenizer() -> Any:
    """Bytes, of the kind that reports which characters a token stands for: assistant_only_loss needs that."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    names = ["<pad>", "</s>", *sorted(letters)]
    made = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {"pad_token": "<pad>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE, **special)


def rows(count: int = 12, length: int = 9) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    return Dataset.from_dict({"input_ids": torch.randint(3, 300, (count, length), generator=generator).tolist()})


def texts() -> Dataset:
    return Dataset.from_dict({"text": [f"text {i} " * (1 + i % 3) for i in range(12)]})


def chats() -> Dataset:
    said = [[{"role": "user", "content": f"{i} + 1?"}, {"role": "assistant", "content": f"{i + 1}"}] for i in range(8)]
    return Dataset.from_dict({"messages": said})


class Calls:
    """The calls of a model's backbone in training: initial states and final states, (rows, ...) or None."""

    def __init__(self, watched: Any) -> None:
        self.initial: list[Tensor | None] = []
        self.final: list[Tensor] = []
        self.inputs: list[dict[str, Any]] = []
        if hasattr(watched, "backbone"):
            watched.backbone.register_forward_pre_hook(self.before, with_kwargs=True)
            watched.backbone.register_forward_hook(self.after)

    def before(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        state = kwargs.get("initial_state")
        self.initial.append(None if state is None else state[0].recurrent.clone())
        self.inputs.append(kwargs)

    def after(self, module: Any, args: Any, output: Any) -> None:
        if output.final_state is not None:
            self.final.append(output.final_state[0].recurrent.detach().clone())


def trained(path: Path, method: Any = StatePassingTrainer, data: Any = None, **fields: Any) -> tuple[Any, Calls]:
    trainer_class, config_class = combine(method, trl.SFTTrainer)
    further = {name: fields.pop(name) for name in ("peft_config", "eval_dataset", "callbacks") if name in fields}
    trained_model = fields.pop("model", None) or model()
    calls = Calls(trained_model)
    trainer = trainer_class(
        trained_model,
        config_class(str(path), **SETTINGS | fields),
        train_dataset=rows() if data is None else data,
        processing_class=tokenizer(),
        **further,
    )
    trainer.train()
    return trainer, calls


@pytest.mark.thinned(2)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_weights_are_those_of_our_own_trainer(tmp_path: Path, accumulation: int) -> None:
    sft, _ = trained(tmp_path / "sft", gradient_accumulation_steps=accumulation)
    checkpointing = "activation_checkpointing" if SINCE_5_23 else "gradient_checkpointing"
    changes = {"gradient_accumulation_steps": accumulation, checkpointing: True}
    arguments = StatePassingConfig(str(tmp_path / "own"), **SETTINGS | changes)
    data = rows().map(lambda row: {"labels": row["input_ids"]}).with_format("torch")
    own = StatePassingTrainer(model(), arguments, train_dataset=data)
    own.train()
    for (name, one), other in zip(sft.model.named_parameters(), own.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    ("method", "fields"),
    [
        (ZeroStateTrainer, {}),
        (RandomNoiseTrainer, {"noise_sigma": 0.1}),
        (FittedNoiseTrainer, {}),
        (MixedStatesTrainer, {"mixture": {"zero": 0.5, "state_passing": 0.5}}),
        (StateXTrainer, {"expand_count": 1}),
        (LearnedStateTrainer, {"train_model": True}),
    ],
)
def test_every_source_goes_with_sft(tmp_path: Path, method: Any, fields: dict[str, Any]) -> None:
    trainer, calls = trained(tmp_path, method, texts(), **fields)
    assert type(trainer).__name__ == method.__name__.removesuffix("Trainer") + "SFTTrainer"
    if method is not StateXTrainer:  # which trains a copy
        assert len(calls.initial) == 3
        assert (calls.initial[-1] is None) == (method is ZeroStateTrainer)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("method", [AlignmentTrainer, StatePassingTrainer])
def test_the_alignment_loss_goes_with_rows_of_one_length(tmp_path: Path, method: Any) -> None:
    trainer, calls = trained(
        tmp_path, method, texts(), packing=True, packing_strategy="wrapped", max_length=12, alignment_alpha=0.2
    )
    assert len(calls.initial) == 3
    assert {len(row["input_ids"]) for row in trainer.train_dataset} == {12}
    assert [entry["misalignment"] > 0 for entry in trainer.state.log_history if "misalignment" in entry] == [True] * 3


def test_a_packed_text_is_a_sequence_with_a_state_of_its_own(tmp_path: Path) -> None:
    trainer, calls = trained(tmp_path, data=texts(), packing=True, max_length=80, state_drop_probability=0.0)
    assert len(calls.initial) == 3
    for step, inputs in enumerate(calls.inputs):
        lengths = inputs["attention_mask"].sum(1)
        assert len(lengths) > 2
        assert "position_ids" not in inputs
        if step:
            before, initial = calls.final[step - 1], calls.initial[step]
            assert initial is not None
            shared = min(len(initial), len(before))
            torch.testing.assert_close(initial[:shared], before[:shared], rtol=0, atol=0)
    assert all("mean_token_accuracy" in entry for entry in trainer.state.log_history if "loss" in entry)


PADDED_PACKS: dict[str, Any] = {"packing": True, "max_length": 80, "pad_to_multiple_of": 8}
LAYOUTS = {
    "padding": {},
    "packing": {"packing": True},
    "wrapped": {"packing": True, "packing_strategy": "wrapped"},
    "padding free": {"padding_free": True, "max_length": None},
}


@pytest.mark.thinned(7)
@pytest.mark.parametrize("hybrid", [False, True], ids=["family", "hybrid"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", [None, ZeroStateTrainer, StatePassingTrainer], ids=["SFT", "zero", "passing"])
def test_padded_and_packed_texts_give_the_loss_of_each_alone(
    tmp_path: Path, method: Any, layout: str, hybrid: bool
) -> None:
    trained_model: Any = stateful(tiny_hybrid("falcon_h1", vocab_size=384)) if hybrid else model()
    fresh = copy.deepcopy(trained_model)
    pair: Any = (trl.SFTTrainer, trl.SFTConfig) if method is None else combine(method, trl.SFTTrainer)
    trainer_class, config_class = pair
    settings = SETTINGS | {"max_steps": 1, "max_length": 80} | LAYOUTS[layout]
    trainer = trainer_class(
        trained_model, config_class(str(tmp_path), **settings), train_dataset=texts(), processing_class=tokenizer()
    )
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.train()
    losses = []
    for row, labels, positions in zip(batch["input_ids"], batch["labels"], positions_of(batch), strict=True):
        begins = [*(positions == 0).nonzero()[:, 0].tolist(), len(row)]
        for first, last in pairwise(begins):
            logits = fresh(input_ids=row[None, first:last], use_cache=False).logits[0]
            losses.append(F.cross_entropy(logits[:-1], labels[first + 1 : last], reduction="none"))
            losses[-1] = losses[-1][labels[first + 1 : last] != -100]
    assert len(losses) > 1
    assert ("cu_seq_lens_q" in batch) == (layout in ("packing", "padding free"))
    expected = float(torch.cat(losses).mean().detach())
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-3)


def positions_of(batch: dict[str, Any]) -> Tensor:
    if (positions := batch.get("position_ids")) is not None:
        return positions
    return batch["attention_mask"].cumsum(1) - 1


def test_chats_and_adapters(tmp_path: Path) -> None:
    lora = LoraConfig(r=2, target_modules=["in_proj"], task_type="CAUSAL_LM")
    trainer, calls = trained(
        tmp_path,
        data=chats(),
        assistant_only_loss=True,
        peft_config=lora,
        eval_dataset=chats(),
        gradient_accumulation_steps=2,
        state_drop_probability=0.0,
    )
    assert [initial is None for initial in calls.initial] == [True, True, False, False, False, False]
    batch = next(iter(trainer.get_train_dataloader()))
    scored = batch["input_ids"][0][batch["labels"][0] != -100]
    assert tokenizer().decode(scored).strip().isdecimal()
    found = trainer.evaluate()
    assert found["eval_loss"] > 0
    assert calls.initial[-1] is None  # evaluation starts from zero


@pytest.mark.slow
def test_the_lineage_reports_the_method_and_the_settings_of_both(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path / "base")
    start = StatefulMamba2ForCausalLM.from_pretrained(tmp_path / "base")
    trainer_class, config_class = combine(trl.SFTTrainer, StatePassingTrainer)
    arguments = config_class(str(tmp_path / "out"), **SETTINGS | {"completion_only_loss": False})
    trainer = trainer_class(start, arguments, train_dataset=texts(), processing_class=tokenizer())
    trainer.train()
    trainer.save_model()
    lineage = read_lineage(tmp_path / "out")
    assert lineage is not None
    run = lineage.steps[0].training
    assert run is not None
    assert run.methods == (StatePassingTrainer.about,)
    (settings,) = run.settings
    assert settings.method["state_drop_probability"] == 0.1
    assert settings.others["completion_only_loss"] is False
    real = [len(text) + 1 for text in texts()["text"]]
    assert 6 * min(real) <= run.tokens <= 6 * max(real)
    assert run.tokens == trainer.state.log_history[-2]["num_tokens"]
    assert (run.rows_per_step, run.row_tokens) == (2, run.tokens / 6)
    assert not {"dataset_text_field", "eos_token"} & settings.others.keys()


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole, _ = trained(tmp_path / "whole", **saving)
    trainer_class, config_class = combine(StatePassingTrainer, trl.SFTTrainer)
    arguments = config_class(str(tmp_path / "again"), **SETTINGS | saving)
    again = trainer_class(model(), arguments, train_dataset=rows(), processing_class=tokenizer())
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(
    "make", [model, lambda: stateful(tiny_hybrid("lfm2", vocab_size=384))], ids=["family", "hybrid"]
)
def test_long_chats_are_read_in_chunks_as_by_tbtt_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Any
) -> None:
    fields = {"assistant_only_loss": True, "logging_steps": 3}
    chunks, calls = trained(tmp_path / "chunks", TbttTrainer, chats(), model=make(), bptt_chunk_length=4, **fields)
    assert "set max_length=None" in caplog.text
    caplog.clear()
    fields["max_length"] = None
    whole, _ = trained(tmp_path / "whole", TbttTrainer, chats(), model=make(), bptt_chunk_length=64, **fields)
    assert "max_length" not in caplog.text
    assert make is not model or len(calls.initial) > 3 * 3  # steps of at least three chunks
    examples, longest = [], 0
    for row in chunks.train_dataset:
        longest = max(longest, len(row["input_ids"]))
    for row in chunks.train_dataset:
        ids, labels = torch.tensor(row["input_ids"]), torch.tensor(row["labels"])
        item = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
        space = (0, longest - len(ids))
        examples.append({name: F.pad(each, space, value=-100 * (name == "labels")) for name, each in item.items()})
    alone = make()
    args = TbttConfig(str(tmp_path), **SETTINGS, bptt_chunk_length=4, lr_scheduler_type="linear")
    TbttTrainer(alone, args, train_dataset=examples).train()
    for one, other in zip(chunks.model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)
    assert any((a - b).abs().max() > 1e-4 for a, b in zip(whole.model.parameters(), alone.parameters(), strict=True))
    assert chunks.state.log_history[-2]["num_tokens"] == whole.state.log_history[-2]["num_tokens"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alignment_alpha": 0.1, "loss_type": "dft"}, "loss_type='dft'"),
        ({"alignment_alpha": 0.1, "alignment_length": 8}, "padding"),
        ({"bptt_chunk_length": 4}, "set bptt_window=1"),
        ({"bptt_chunk_length": 4, "bptt_window": 2}, "set bptt_window=1"),
        (PADDED_PACKS, "pad_to_multiple_of fills packed sequences"),
        (
            {"method": LearnedStateTrainer, "peft_config": LoraConfig(target_modules=["in_proj"])},
            "peft_config would freeze the learned state",
        ),
    ],
    ids=["loss", "padding", "chunks", "windows", "padded packs", "frozen state"],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trained(tmp_path, data=texts(), **fields)


def test_packed_rows_may_be_padded_where_all_start_from_zero(tmp_path: Path) -> None:
    trained(tmp_path, ZeroStateTrainer, **PADDED_PACKS)


def test_granite_4_trains_with_the_loss_of_its_experts(tmp_path: Path) -> None:
    hybrid: Any = stateful(tiny_hybrid("granitemoehybrid", vocab_size=384))
    trainer_class, config_class = combine(StatePassingTrainer, trl.SFTTrainer)
    losses = []
    for weight in (0.0, 0.5):
        arguments = config_class(str(tmp_path), **SETTINGS | {"max_steps": 1, "router_aux_loss_coef": weight})
        trainer = trainer_class(copy.deepcopy(hybrid), arguments, train_dataset=texts(), processing_class=tokenizer())
        trainer.train()
        losses.append(trainer.state.log_history[0])
        assert "num_experts" not in trainer.model.config.to_dict()
    assert losses[1]["loss"] - losses[0]["loss"] == pytest.approx(0.5 * losses[1]["aux_loss"], rel=1e-3)


# --- trainers of Transformers and of users, and how the config of any trainer is found ---


def test_a_trainer_of_ones_own_goes_with_a_method(tmp_path: Path) -> None:
    class Weighted(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(*args, **kwargs)

    trainer_class, config_class = combine(Weighted, StatePassingTrainer)
    assert config_class is StatePassingConfig
    settings = toys.QUIET | {"max_steps": 2, "save_strategy": "no", "logging_steps": 1}
    trainer = trainer_class(
        toys.tiny_model(), config_class(str(tmp_path), **settings), train_dataset=toys.sequences(16)
    )
    trainer.train()
    assert 2 * 2.5 < trainer.state.log_history[0]["loss"] < 2 * 3.5  # ln 17 = 2.8


def test_generation_at_evaluation_goes_with_a_method(tmp_path: Path) -> None:
    trainer_class, config_class = combine(Seq2SeqTrainer, StatePassingTrainer)
    assert issubclass(config_class, Seq2SeqTrainingArguments)
    settings = toys.QUIET | {"max_steps": 2, "save_strategy": "no", "predict_with_generate": True}
    arguments = config_class(str(tmp_path), **settings, generation_max_length=14)
    rows = toys.sequences(16)
    trainer = trainer_class(toys.tiny_model(), arguments, train_dataset=rows, eval_dataset=rows[:3])
    trainer.train()
    expected = trainer.model.generate(torch.stack([row["input_ids"] for row in rows[:3]]), max_length=14)
    found = trainer.predict(rows[:3]).predictions[:, : expected.shape[1]]
    assert found.tolist() == expected.tolist()


class OnOwnTexts(trl.SFTTrainer):  # type: ignore[misc]
    pass


class WeighingTrainer(Trainer):
    pass


@dataclass
class WeighingConfig(TrainingArguments):
    own: int = 3


@pytest.mark.parametrize(
    ("other", "config"),
    [
        (OnOwnTexts, trl.SFTConfig),
        (WeighingTrainer, WeighingConfig),
        (Seq2SeqTrainer, Seq2SeqTrainingArguments),
    ],
)
def test_the_config_of_any_trainer_is_found(other: Any, config: Any) -> None:
    trainer_class, config_class = combine(other, StatePassingTrainer)
    assert trainer_class.config_class is config_class
    assert issubclass(config_class, config)
    assert issubclass(config_class, trl.SFTConfig) == (config is trl.SFTConfig)


def test_the_config_has_the_fields_of_both_and_the_defaults_of_trl(tmp_path: Path) -> None:
    trainer, config = combine(StatePassingTrainer, trl.SFTTrainer)
    assert combine(trl.SFTTrainer, StatePassingTrainer) == (trainer, config)
    arguments = config(str(tmp_path), use_cpu=True, state_drop_probability=0.3)
    assert (arguments.learning_rate, arguments.max_length) == (2e-5, 1024)
    alone = StatePassingConfig(str(tmp_path), use_cpu=True, state_drop_probability=0.3)
    assert arguments.method_settings() == alone.method_settings()
    for same in (copy.deepcopy(arguments), pickle.loads(pickle.dumps(arguments))):
        assert isinstance(same, config)
        assert same.to_dict() == arguments.to_dict()
    with pytest.raises(ValueError, match="state_drop_probability must be between 0 and 1"):
        config(str(tmp_path), use_cpu=True, state_drop_probability=3)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (lambda: (StatePassingTrainer, trl.DPOTrainer), "DPOTrainer does not train on single texts"),
        (lambda: (trl.GRPOTrainer, StatePassingTrainer), "GRPOTrainer does not train on single texts"),
        (lambda: (StatePassingTrainer, TbttTrainer), "the trainer of one method of this package and one other"),
        (lambda: (trl.SFTTrainer, Trainer), "the trainer of one method of this package and one other trainer"),
    ],
)
def test_other_pairs_are_refused(pair: Callable[[], tuple[Any, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        combine(*pair())
