"""The recipes of checkpoints say what the papers say, and what cannot be meant is refused."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

import hf_recurrent_lengthgen.models  # noqa: F401  (registers the model types)
from hf_recurrent_lengthgen.cli.recipe_stages import Choices, check_commands, stages
from hf_recurrent_lengthgen.recipes import RECIPES
from hf_recurrent_lengthgen.recipes.catalogue import Recipe, in_words, load_recipe, recipe_names

ALL = {name: load_recipe(name) for name in recipe_names()}
README = (RECIPES / "README.md").read_text()

# arXiv:2507.02782, Table 2: learning rates of pre-training; those of post-training are a tenth (B.2, B.4)
TABLE_2 = {
    "mamba-130m": "6e-4",
    "mamba-370m": "3e-4",
    "mamba2-130m": "6e-4",
    "mamba2-370m": "3e-4",
    "mamba2-780m": "2.5e-4",
    "mamba2-1.3b": "2e-4",
    "gla-340M-15B": "3e-4",  # ours: that of GLA 360m
    "gla-1.3B-100B": "2e-4",  # ours: that of Mamba-2 1.3b, as below
    "v6-Finch-1B6-HF": "2e-4",
}
# steps: B.2 (100), Figure 1 (500, Mamba-1 1000), B.4 (1000), 250M and 10B tokens in steps of 2^19, and "Output
# Alignment", 5.1
STEPS = {
    "mamba-130m-state-passing": 1000,
    "mamba-370m-state-passing": 1000,
    "mamba2-130m-state-passing-500": 500,
    "gla-340m-state-passing": 500,
    "gla-1.3b-state-passing": 500,
    "rwkv6-1.6b-state-passing": 477,
    "mamba2-130m-alignment": 200,
    "mamba2-130m-alignment-baseline": 200,
    **{f"mamba2-{size}-passkey-{kind}": 1000 for size in ("130m", "780m") for kind in ("plain", "fitted-noise")},
    **{f"{kind}-{model}": 19073 for kind in ("statex", "vanilla") for model in ("mamba2-1.3b", "gla-1.3b")},
    **{
        f"mamba2-{size}-{kind}": 100
        for size in ("130m", "370m", "780m", "1.3b")
        for kind in ("state-passing", "tbtt", "fitted-noise", "random-noise")
    },
}
WORDS = {
    "fitted-noise": "fitted_noise",
    "random-noise": "random_noise",
    "state-passing": "state_passing",
    "tbtt": "tbtt",
}


def test_every_checkpoint_of_the_papers_has_a_recipe() -> None:
    assert ALL.keys() == STEPS.keys()


@pytest.mark.parametrize("name", ALL)
def test_budgets_rates_and_methods_are_the_papers(name: str) -> None:
    recipe = ALL[name]
    values = recipe.training
    assert recipe.steps == STEPS[name]
    if "alignment" in name:
        assert recipe.rows == 64
        assert values["alignment_alpha"] == ("0" if name.endswith("baseline") else "0.1")
        assert values["learning_rate"] == "6e-5"
        return
    assert recipe.tokens == STEPS[name] * 524_288
    if name.startswith(("statex", "vanilla")):
        assert (values["learning_rate"], values["lr_scheduler_type"], values["warmup_steps"]) == (
            "3e-4",
            "cosine",
            "0.05",
        )
        assert (values["training_length"], values["intervention"]) == ("65536", "none")
        assert abs(recipe.tokens - 10e9) < 524_288
        assert (recipe.expand is not None) == name.startswith("statex")
        return
    base = recipe.source.model.partition("/")[2]
    assert float(values["learning_rate"]) == pytest.approx(float(TABLE_2[base]) / 10)
    assert (values["lr_scheduler_type"], values["lr_scheduler_kwargs"]) == ("cosine_with_min_lr", {"min_lr": "1e-5"})
    assert (values["warmup_steps"], values["max_grad_norm"]) == ("0.1", "1.0")
    assert (values["adam_beta1"], values["adam_beta2"]) == ("0.9", "0.95")
    assert int(values["training_length"]) == recipe.source.training_length
    method = next((word for key, word in WORDS.items() if key in name), "none")
    assert values["intervention"] == method
    assert values.get("state_drop_probability") == {"state_passing": "0.1", "tbtt": "0.0"}.get(method)
    assert values.get("fitted_noise_beta") == ("0.1" if method == "fitted_noise" else None)
    assert values.get("task", "text") == ("passkey" if "passkey" in name else "text")


def test_statex_expands_four_layers_four_times() -> None:
    assert ALL["statex-mamba2-1.3b"].expand == {"count": "4", "factor": "4"}  # 5.1: d_k from 128 to 512
    assert ALL["statex-gla-1.3b"].expand == {"count": "4", "num_heads": "1"}  # 5.1: four heads become one


def test_tokens_are_counted_from_rows_steps_and_length() -> None:
    assert ALL["mamba2-130m-state-passing"].tokens == 100 * 16 * 16 * 2048
    assert ALL["mamba2-130m-alignment"].tokens == 200 * 4 * 16 * 2048
    assert ALL["statex-gla-1.3b"].tokens == 19073 * 8 * 65536
    assert ALL["rwkv6-1.6b-state-passing"].tokens == 477 * 8 * 16 * 4096
    assert [in_words(number) for number in (52_428_800, 9_999_744_000, 999.6e6, 1.6e9, 950)] == [
        "52.4M", "10B", "1B", "1.6B", "950",
    ]  # fmt: skip


def test_parameters_are_those_of_models_of_that_size() -> None:
    for file, source in (
        ("mamba2-130m", "mamba2-130m"),
        ("mamba2-350m", "mamba2-370m"),
        ("mamba2-780m", "mamba2-780m"),
        ("mamba2-1.3b", "mamba2-1.3b"),
    ):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(RECIPES / f"models/{file}.json"))
        model.tie_weights()
        count = sum(parameter.numel() for parameter in model.parameters())
        assert {r.source.parameters for r in ALL.values() if r.source.model == f"state-spaces/{source}"} == {count}
    # as the pages of the checkpoints print them
    assert {in_words(r.source.parameters) for r in ALL.values() if r.source.format == "fla"} == {"342M", "1.37B"}


@pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)
def test_sources_are_official_checkpoints_in_a_known_layout(recipe: Recipe) -> None:
    source = recipe.source
    layouts = {
        "mamba-ssm": (r"state-spaces/mamba2?-(130m|370m|780m|1\.3b)", ("mamba", "mamba2")),
        "fla": (r"fla-hub/gla-(340M-15B|1\.3B-100B)", ("gla",)),
        "rwkv-hf": (r"RWKV/v6-Finch-1B6-HF", ("rwkv6",)),
    }
    names, families = layouts[source.format]
    assert re.fullmatch(names, source.model)
    assert source.family in families
    assert source.revision == "main"  # a run records the commit; no hash is known here
    assert (source.tokenizer == "EleutherAI/gpt-neox-20b") == (source.format == "mamba-ssm")
    assert recipe.expected
    assert recipe.ours
    for item in recipe.expected:
        assert re.search(r"Figure \d|Table \d|Section \d|^\d\.\d", item.source), item


@pytest.mark.thinned(3)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)
def test_every_command_of_every_recipe_is_accepted(recipe: Recipe, tmp_path: Path) -> None:
    sigma: dict[str, Any] = {"train": {name: "0.1" for name in recipe.train.missing}}
    options = {stage: given for stage, given in sigma.items() if given}
    check_commands(stages(recipe, tmp_path, Choices(trust_remote_code=True, options=options)))


OF_OTHER_MODELS = r"--model output/(gla|rwkv6)-70m|--intervention state_passing|tasks/babilong|alignment/llama"


@pytest.mark.parametrize(
    "arguments",
    [
        line
        for line in re.findall(r"^\|.*\| `lengthgen train (.*)` \|$", README, flags=re.MULTILINE)
        if re.match("post_training|alignment|tasks|statex", line) and not re.search(OF_OTHER_MODELS, line)
    ],
)
def test_every_run_of_the_readme_from_an_official_checkpoint_is_that_of_a_recipe(arguments: str) -> None:
    file, *flags = shlex.split(arguments)
    values = yaml.load((RECIPES / file).read_text(), Loader=yaml.BaseLoader)
    names = [flag.removeprefix("--").replace("-", "_") for flag in flags[::2]]
    values.update(zip(["output_dir" if name == "output" else name for name in names], flags[1::2], strict=True))
    model = values.pop("model").rpartition("/")[2].removesuffix("-hf").removeprefix("statex-")
    expanded = ("--model" not in flags and file.startswith("statex")) or "output/statex-" in arguments
    del values["output_dir"]
    values.pop("noise_sigma", None)
    same = [
        recipe.name
        for recipe in ALL.values()
        if recipe.train.file == file
        and model.lower() in (recipe.source.model.rpartition("/")[2].lower(), f"{recipe.source.family}-1.3b")
        and (recipe.expand is not None) == expanded
        and {k: v for k, v in recipe.training.items() if k not in ("model", "output_dir")} == values
    ]
    assert len(same) == 1, same


def write(folder: Path, change: dict[str, Any]) -> str:
    """A changed copy of a recipe in a copy of the recipes' folders."""
    (folder / "checkpoints").mkdir()
    (folder / "post_training").mkdir()
    (folder / "post_training/state_passing.yaml").write_text(
        (RECIPES / "post_training/state_passing.yaml").read_text()
    )
    text = (RECIPES / "checkpoints/mamba2-130m-state-passing.yaml").read_text()
    (folder / "checkpoints/base.yaml").write_text(text)
    path = folder / "checkpoints/mine.yaml"
    path.write_text(yaml.safe_dump({"like": "base", **change}))
    return str(path)


def test_a_recipe_of_ones_own_inherits_entry_by_entry(tmp_path: Path) -> None:
    change = {"title": "Mine", "train": {"options": {"max_steps": 7}}, "measure": {"diagnose": None}}
    recipe = load_recipe(write(tmp_path, change))
    assert (recipe.name, recipe.title, recipe.steps) == ("mine", "Mine", 7)
    assert recipe.training["learning_rate"] == "6e-5"
    assert recipe.measure == {"evaluate": {"length": "32768", "sequences": "32"}}
    assert recipe.training_file == tmp_path / "post_training/state_passing.yaml"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"titel": "x"}, "titel: there is no such entry"),
        ({"source": {"modell": "x"}}, "source.modell: there is no such entry"),
        ({"source": {"parameters": "many"}}, "source.parameters: Input should be a valid integer.* got 'many'"),
        ({"source": {"remote_code": "perhaps"}}, "source.remote_code: Input should be a valid boolean.* 'perhaps'"),
        ({"measure": {"evaluat": {"length": 8}}}, "measure.evaluat: Input should be 'evaluate', 'diagnose' or"),
        ({"measure": None}, "mine.yaml: measure: is missing"),
        ({"measure": {"evaluate": None, "diagnose": None}}, "mine.yaml: measure is empty"),
        ({"expected": "all"}, "expected: Input should be a valid tuple, got 'all'"),
        ({"expected": [{"what": "x"}]}, r"expected.0.source: is missing"),
        ({"train": {"file": "post_training/sp.yaml"}}, "train.file is 'post_training/sp.yaml', but .* does not exist"),
        ({"train": {"options": {"model": "x"}}}, "train.options has model, which a run sets itself"),
        ({"name": "other"}, "name follows from the file; leave it out"),
        ({"data": None}, "data must be described if"),
        ({"like": "nothing"}, "like names 'nothing'"),
        ({"paper": {"places": ["a"]}}, r"paper.places: Input should be a valid string, got \['a'\]"),
        ({"paper": {"arxiv": "1234.5678"}}, "paper.arxiv is '1234.5678', but must be one of 2507.02782, "),
    ],
)
def test_what_cannot_be_meant_is_refused(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=complaint):
        load_recipe(write(tmp_path, change))


def test_a_name_that_is_not_there_gets_the_near_ones() -> None:
    with pytest.raises(ValueError, match="did you mean mamba2-130m-tbtt"):
        load_recipe("mamba2-130m-tbbt")
    with pytest.raises(ValueError, match="lengthgen recipe list lists all"):
        load_recipe("zzz")
