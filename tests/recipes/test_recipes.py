"""Every recipe is accepted by the command, and says what the papers say."""

import json
import re
import shlex
import shutil
import subprocess
import textwrap
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

import hf_recurrent_lengthgen.models  # noqa: F401  (registers the model types)
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.cli.options import read_options
from hf_recurrent_lengthgen.recipes import RECIPES, copy_recipes, recipe_names, recipe_text
from hf_recurrent_lengthgen.trainers import MixedStatesTrainer
from hf_recurrent_lengthgen.yaml_files import UniqueKeys

FILES = sorted(RECIPES.glob("*/*.yaml"))
MODELS = sorted(RECIPES.glob("models/*.json"))
COMMANDS = re.findall(r"^\|.*\| `lengthgen train (.*)` \|$", (RECIPES / "README.md").read_text(), flags=re.MULTILINE)
TOKENS_PER_STEP = 2**19

# arXiv:2507.02782, Table 2 by the names of the paper
LEARNING_RATES = {
    "mamba-130m": 6e-4,
    "mamba-350m": 3e-4,
    "mamba2-45m": 1e-3,
    "mamba2-85m": 1e-3,
    "mamba2-130m": 6e-4,
    "mamba2-350m": 3e-4,
    "mamba2-780m": 2.5e-4,
    "mamba2-1.3b": 2e-4,
    "gla-70m": 1e-3,
    "gla-120m": 6e-4,
    "gla-360m": 3e-4,
}
# layers, width, number and size of heads (state size N for Mamba-1); heads of Mamba-2 as in arXiv:2410.07145, Table 2
SIZES = {
    "mamba-130m": (24, 768, None, 16),
    "mamba-350m": (48, 1024, None, 16),
    "mamba2-36m": (6, 512, 16, 64),
    "mamba2-45m": (12, 512, 16, 64),
    "mamba2-85m": (12, 768, 24, 64),
    "mamba2-130m": (24, 768, 24, 64),
    "mamba2-350m": (48, 1024, 32, 64),
    "mamba2-780m": (48, 1536, 48, 64),
    "mamba2-1.3b": (48, 2048, 64, 64),
    "gla-70m": (6, 512, 4, 128),
    "gla-120m": (6, 768, 4, 192),
    "gla-360m": (20, 1024, 4, 256),
    "rwkv6-70m": (6, 512, 4, 128),
    # arXiv:2410.11135: Figures 9, 2 and 3; N of Mamba-1 is 32, see section 5
    "symbols-mamba2-14m": (2, 1024, 32, 64),
    "symbols-mamba2-53m": (8, 1024, 32, 64),
    "symbols-attention-51m": (8, 1024, 32, 64),
    "symbols-mamba2-159m": (24, 1024, 32, 64),
    "symbols-mamba-163m": (24, 1024, None, 32),
    # arXiv:2509.22630, C.5: 24 layers; one head of 512 keys, four of 128, and so on
    "gla-1-head-340m": (24, 1024, 1, 1024),
    "gla-4-heads-340m": (24, 1024, 4, 256),
    "gla-8-heads-340m": (24, 1024, 8, 128),
    "gla-16-heads-340m": (24, 1024, 16, 64),
}
# arXiv:2410.07145, Table 2: elements of the state
STATE_SIZES = {
    "mamba2-36m": 0.8e6,
    "mamba2-45m": 1.6e6,
    "mamba2-85m": 2.4e6,
    "mamba2-130m": 4.8e6,
    "mamba2-350m": 12.9e6,
    "mamba2-780m": 19.3e6,
}
# billions of tokens: Figures 2, 3, 10 and 11 of arXiv:2507.02782, else 200 per parameter of the name; arXiv:2509.22630
TOKENS = {
    "mamba2-45m": 22.5,
    "mamba2-85m": 34,
    "mamba2-130m": 25,
    "gla-70m": 34,
    "rwkv6-70m": 35,
    "mamba2-85m-1024": 34,
    "mamba2-45m-warmup-10": 9,
    "mamba2-45m-warmup-25": 9,
    "mamba-130m": 26,
    "mamba-350m": 70,
    "mamba2-350m": 70,
    "mamba2-780m": 156,
    "mamba2-1.3b": 260,
    "gla-120m": 24,
    "gla-360m": 72,
    "rwkv6-70m-state-passing": 0.25,
    "statex-mamba2-1.3b-trained": 10,
    "statex-gla-1.3b-trained": 10,
    "vanilla-mamba2-1.3b": 10,
    "vanilla-gla-1.3b": 10,
    **dict.fromkeys(("gla-1-head-340m", "gla-4-heads-340m", "gla-8-heads-340m", "gla-16-heads-340m"), 20),
}


def meta_model(path: Path) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_models_have_the_sizes_and_the_parameters_of_their_names(path: Path) -> None:
    model = meta_model(path)
    config = model.config
    layers, width, heads, size = SIZES[path.stem]
    assert (config.num_hidden_layers, config.hidden_size) == (layers, width)
    if heads is None:
        assert config.state_size == size
    elif config.model_type == "stateful_mamba2":
        assert (config.num_heads, config.head_dim, config.state_size) == (heads, size, 128)
        if path.stem in STATE_SIZES:
            taps = (heads * size + 2 * 128) * 3  # the last 3 tokens' inputs of the convolution count, too
            assert abs(layers * (heads * size * 128 + taps) - STATE_SIZES[path.stem]) < 0.06e6
    else:
        assert (config.num_heads, config.hidden_size // config.num_heads) == (heads, size)
    number, unit = re.fullmatch(r".*-([\d.]+)([mb])", path.stem).groups()  # type: ignore[union-attr]
    named = float(number) * {"m": 1e6, "b": 1e9}[unit]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # official names are rough: "350m" are 370m
    assert abs(parameters / named - 1) < (0.07 if "350m" in path.stem else 0.035), parameters
    least = 515 if path.stem.startswith("symbols") else 32_000 if "head" in path.stem else 50_277  # gpt-neox-20b
    assert model.config.vocab_size >= least
    known = set(type(config)().to_dict()) | set(vars(config))
    assert json.loads(path.read_text()).keys() <= known


def test_the_snippets_of_the_readme(tmp_path: Path) -> None:
    text = (RECIPES / "README.md").read_text()
    [mixture] = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "mixed.yaml").write_text(textwrap.dedent(mixture))
    _, training, trainer = read_options(["--model", "m", "--use-cpu"], str(tmp_path / "mixed.yaml"))
    assert trainer is MixedStatesTrainer
    assert training.mixture == {"zero": 0.1, "state_passing": 0.45, "fitted_noise": 0.45}  # type: ignore[attr-defined]
    [arguments] = re.findall(r"torchrun --nproc_per_node 2 -m hf_recurrent_lengthgen.cli.main train (.*)\n", text)
    rows = values_of(arguments)
    per_step = 2 * int(rows["per_device_train_batch_size"]) * int(rows["gradient_accumulation_steps"])
    assert per_step * int(rows["training_length"]) == TOKENS_PER_STEP
    [(sigmas, loop)] = re.findall(r"for sigma in (.*?); do\n(.*?)\ndone\n", text, flags=re.DOTALL)
    [arguments] = re.findall(
        r"\|\| lengthgen train (.*) \$resume", loop.replace("$sigma", "3").replace("$arm", "output/noise-3")
    )
    assert (
        values_of(arguments).items()
        >= {"noise_sigma": "3", "output_dir": "output/noise-3", "max_steps": "100"}.items()
    )
    runs = RUNS.keys() | {f"noise-{sigma}" for sigma in sigmas.split()}
    [commands] = re.findall(r"^(sed .*?)^lengthgen", text, flags=re.MULTILINE | re.DOTALL)
    changed = [values_of(arguments) for arguments in re.findall(r"^lengthgen train (tasks.*)$", text, re.MULTILINE)]
    assert {values["model"] for values in changed} < made_with_sed(commands, tmp_path).keys()
    runs |= {values["output_dir"].removeprefix("output/") for values in changed}
    converted = dict(re.findall(r"^lengthgen convert (\S+) --output (\S+) --training-length \d+$", text, re.MULTILINE))
    measuring = re.findall(r"^lengthgen (retrieve|accuracy|evaluate|diagnose|maps) (.*)$", text, flags=re.MULTILINE)
    assert len(measuring) > 18
    for name, arguments in measuring:
        words = shlex.split(arguments)
        parser = import_module(f"hf_recurrent_lengthgen.cli.{name}").command_parser
        options = vars(parser(*[words] * len(signature(parser).parameters)).parse_args(words))
        made = [model.removesuffix("/checkpoint-*") for model in options.get("models", ())]
        assert {model.removeprefix("output/") for model in made if model.startswith("output/")} <= runs
        assert {model for model in made if "/" not in model} <= {"gla", "state-passing", *converted.values()}
    harness = re.findall(r"\nlengthgen harness (.*)--tasks (\S+) --model-args pretrained=output/([^\s,]+)", text)
    models = [(option, run) for option, _, run in harness]
    assert models == [("--model hf ", "alignment-llama")] * 2 + [("", "statex-mamba2-1.3b-trained")] * 2
    tasks = [task for _, names, _ in harness for task in names.split(",")]
    for file in [*RECIPES.rglob("*.yaml"), *RECIPES.with_name("harness").rglob("*.yaml")]:
        yaml.load(file.read_text(encoding="utf-8"), Loader=UniqueKeys)
    assert all([*RECIPES.with_name("harness").rglob(f"{task}.yaml")] for task in tasks)


def made_with_sed(commands: str, folder: Path) -> dict[str, Any]:
    """The configs that commands of the README write, which must be those of the paper's figures."""
    shutil.copytree(RECIPES / "models", folder / "models")
    before = {*(folder / "models").iterdir()}
    subprocess.run(["sh", "-ec", commands], cwd=folder, check=True)
    made = {str(path.relative_to(folder)): meta_model(path).config for path in {*folder.glob("models/*")} - before}
    assert {name: config.num_hidden_layers for name, config in made.items() if "layers" in name} == {
        "models/symbols-4-layers.json": 4
    }
    linear = [config for config in made.values() if config.attention_layers == [3]]
    assert {(config.attention_kind, config.attention_head_dim) for config in linear} == {
        ("linear", 8),
        ("linear", 32),
        ("linear", 1024),
    }
    assert {config.state_size for name, config in made.items() if "-n-" in name} == {32, 64, 512}
    return made


def values_of(arguments: str) -> dict[str, Any]:
    """Options of "FILE --flag value ..." as they are written: flags win over the file."""
    file, *flags = shlex.split(arguments)
    values: dict[str, Any] = yaml.load((RECIPES / file).read_text(), Loader=yaml.BaseLoader)
    for name, *words in map(str.split, filter(None, re.split(r"(?:^| )--", " ".join(flags)))):
        values["output_dir" if name == "output" else name.replace("-", "_")] = " ".join(words)
    return values


RUNS = {values_of(arguments)["output_dir"].removeprefix("output/"): values_of(arguments) for arguments in COMMANDS}


def test_every_file_is_in_the_readme_and_no_run_writes_over_another() -> None:
    used = {shlex.split(arguments)[0] for arguments in COMMANDS}
    assert used == {path.relative_to(RECIPES).as_posix() for path in FILES}
    assert len(RUNS) == len(COMMANDS) > 30


def is_number(text: str) -> bool:
    return re.fullmatch(r"-?[\d.]+(e-?\d+)?", text) is not None


# the name in all supported versions of Transformers
@pytest.mark.thinned(3)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("arguments", COMMANDS, ids=RUNS)
def test_every_run_is_accepted_as_it_is_written(arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RECIPES)
    arguments = arguments.replace("SIGMA", "0.1") + " --use-cpu true"
    file, *flags = shlex.split(arguments)
    settings, training, _ = read_options(flags, file)
    for name, value in values_of(arguments).items():
        read = getattr(settings if hasattr(settings, name) else training, name)
        read = getattr(read, "value", read)  # of an enumeration
        if isinstance(value, dict):
            assert read == {key: float(item) if is_number(item) else item for key, item in value.items()}
        elif isinstance(read, list):
            assert [str(item) for item in read] == value.split(), name
        elif isinstance(value, str) and is_number(value):
            assert float(read) == float(value), name
        else:
            assert str(read).lower() == str(value).lower(), name


@pytest.mark.parametrize("values", RUNS.values(), ids=RUNS)
def test_models_are_files_here_official_checkpoints_or_results_of_other_runs(values: dict[str, Any]) -> None:
    model = values["model"]
    expanded = re.findall(r"`lengthgen expand .* --output (\S+)`", (RECIPES / "README.md").read_text())
    assert len(expanded) == 2
    assert (
        (RECIPES / model).is_file()
        or model in expanded
        or model.removeprefix("output/") in RUNS
        or re.fullmatch(
            r"AntonV/mamba2-(130m|370m|780m|1\.3b)-hf|state-spaces/mamba-[13]\d0m-hf|fla-hub/gla-.*"
            r"|meta-llama/Llama-2-7b-hf|output/llama-2-7b-8k|Qwen/Qwen3\.5-4B|tiiuae/Falcon-H1-7B-Instruct",
            model,
        )
    )


def paper_name(model: str) -> str:
    name = Path(model).name.removesuffix(".json").removesuffix("-hf")
    return re.sub(r"-state-passing$|-tbtt$", "", name).replace("370m", "350m")


@pytest.mark.parametrize("run", RUNS)
def test_batches_learning_rates_and_lengths_are_the_papers(run: str) -> None:
    values = RUNS[run]
    rows = int(values["per_device_train_batch_size"]) * int(values.get("gradient_accumulation_steps", 1))
    name, rate = paper_name(values["model"]), float(values["learning_rate"])
    if run.startswith("s0"):  # arXiv:2604.01168, 3.1, 4.2 and Appendix A
        assert (values["max_steps"], rows, rate) == ("20", 48, 1e-3)
        assert (values["state_l2"], values["state_scale"]) == ("5e-4", "0.65" if "falcon" in run else "0.07")
        return
    if values.get("task") == "examples":  # ours
        assert (run, rows, rate) == ("mamba2-1.3b-far-memory", 16, LEARNING_RATES["mamba2-1.3b"] / 10)
        return
    if run.startswith("alignment"):
        assert rows == 64
        if "llama" in run:  # arXiv:2506.11769, 5.1 and 5.2
            assert (values["training_length"], values["max_steps"]) == ("8192" if "8k" in run else "4096", "200")
        return
    if "task_length" in values:
        if "mimetic" in values:  # arXiv:2410.11135, section 5 and reproducibility statement
            assert (values["max_steps"], values["task_length"]) == ("5000", "50")
            assert rate in (1e-3, 5e-4, 1e-4)
            # section 5 takes the pipeline of arXiv:2402.01032, but for recall, whose rows are zoology's
            assert (rows, values["task_row_length"]) == (8, "0" if values["task"] == "recall" else "220")
            pipeline = values["weight_decay"], values["lr_scheduler_type"], values["warmup_steps"]
            assert pipeline == ("0.1", "linear", "100")
        else:  # arXiv:2507.02782, Table 1
            assert (rows * int(values["max_steps"]), values["task_length"], rate) == (1_000_000, "50-100", 1e-3)
        return
    assert rows * int(values["training_length"]) == TOKENS_PER_STEP
    if run in TOKENS:
        assert int(values["max_steps"]) == round(TOKENS[run] * 1e9 / TOKENS_PER_STEP)
    if "statex" in run or "vanilla" in run or "head" in run:
        assert (rate, values["lr_scheduler_type"], values["warmup_steps"]) == (3e-4, "cosine", "0.05")
    elif run.startswith("stuffed"):
        assert rate in (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3)
        assert (values["weight_decay"], values["max_grad_norm"], values["chunks_before_reset"]) == ("0.1", "1.0", "12")
    else:
        expected: Any = LEARNING_RATES.get(name, LEARNING_RATES["gla-70m"] if name == "rwkv6-70m" else None)
        assert rate == pytest.approx(expected if values["model"].endswith(".json") else expected / 10)
        assert values["warmup_steps"] == ("0.25" if run.endswith("warmup-25") else "0.1")
        assert (values["lr_scheduler_type"], values["lr_scheduler_kwargs"]) == (
            "cosine_with_min_lr",
            {"min_lr": "1e-5"},
        )
        assert (values["adam_beta1"], values["adam_beta2"], values["max_grad_norm"]) == ("0.9", "0.95", "1.0")
    contexts = {"gla-70m": "512", "gla-120m": "512", "gla-360m": "512", "rwkv6-70m": "256"}
    if not re.search("1024|512|warmup|statex|vanilla|head", run):
        assert values["training_length"] == contexts.get(name, "2048")


def test_the_command_lists_shows_and_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "list"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == recipe_names()
    assert all("arXiv:" in row or "Output Alignment" in row or "ours" in row for row in rows), rows
    assert main(["recipe", "show", "post_training/tbtt"]) == 0
    assert capsys.readouterr().out == (RECIPES / "post_training/tbtt.yaml").read_text()
    assert main(["recipe", "copy", str(tmp_path / "mine")]) == 0
    copied = {path.relative_to(tmp_path / "mine") for path in (tmp_path / "mine").rglob("*") if path.is_file()}
    assert copied == {Path("README.md"), *(path.relative_to(RECIPES) for path in [*FILES, *MODELS])}
    with pytest.raises(ValueError, match="mine exists: give a new folder"):
        copy_recipes(tmp_path / "mine")
    with pytest.raises(ValueError, match="lengthgen recipe list lists all"):
        recipe_text("zzz")
