"""Whether a change of the code changed any number: digests of what tiny models compute, bit by bit.

    python benchmarks/identity.py --write before.json      in a checkout of the state before
    python benchmarks/identity.py --compare before.json    in the changed one

Both run in the root of the checkout that they measure, on its package and its tables of tiny models in tests/,
whichever checkout this file is from. A case is a model and a form of its sequences, a surgery, a conversion there and
back, a training run (whole, and resumed), or a measurement of a checkpoint in model_cards/. Its digest is the sha256
of every tensor and number that comes out. Seeds are fixed and there is one thread, so two runs on one machine agree.
A case that fails has the digest "error: ..."; of two errors only the types are compared.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, os.getcwd())
from hf_recurrent_lengthgen import forgetting, stateful, trainers
from hf_recurrent_lengthgen.checkpoints.conversion.convert import convert_checkpoint
from hf_recurrent_lengthgen.checkpoints.conversion.export import export_checkpoint
from hf_recurrent_lengthgen.checkpoints.conversion.registry import FORMATS
from hf_recurrent_lengthgen.checkpoints.conversion.tiny_random_models import write_tiny_random_model
from hf_recurrent_lengthgen.cli.main import main as lengthgen
from hf_recurrent_lengthgen.data.continued import ContinuedChunks
from hf_recurrent_lengthgen.models import STATEFUL_CLASSES
from hf_recurrent_lengthgen.surgery import expand_state, mimetic_initialization
from tests.hybrids.tiny_models import SUPPORTED_TYPES, tiny_model
from tests.models.families import FAMILIES, MAMBA2, VARIANTS, build

LENGTH, WINDOW = 37, 5
FORMS = ("whole", "padded", "packed", "checkpointed", "single tokens", "generated")
SURGERIES = {
    "mimetic": partial(mimetic_initialization, offset=1),
    "expanded": partial(expand_state, layers="all"),
    "expanded, inherit": partial(expand_state, layers="all", initialization="inherit"),
    "window": {"window": WINDOW},
    "decays": {"retention": 0.9, "insertion": 0.8},
    "steps": {"delta_scale": 0.5},
}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero state": ("ZeroState", {}),
    "random noise": ("RandomNoise", {"noise_sigma": 0.3}),
    "fitted noise": ("FittedNoise", {}),
    "state passing": ("StatePassing", {"state_drop_probability": 0.3}),
    "state passing, alignment": ("StatePassing", {"alignment_alpha": 0.2}),
    "state passing in chunks": ("StatePassing", {"bptt_chunk_length": 4, "bptt_window": 2}),
    "tbtt": ("Tbtt", {}),
    "tbtt on examples": ("Tbtt", {"bptt_chunk_length": 4}),
    "learned state": ("LearnedState", {}),
    "learned state and model": ("LearnedState", {"train_model": True}),
    "mixture": ("MixedStates", {"mixture": {"zero": 0.2, "state_passing": 0.4, "fitted_noise": 0.4}}),
    "alignment": ("Alignment", {}),
    "statex": ("StateX", {"new_weights_lr_multiplier": 2.0}),
}
COMMANDS = [
    "evaluate model_cards/mamba2-base --length 1024 --sequences 2",
    "evaluate model_cards/bamba-base --length 512 --sequences 2",
    "retrieve model_cards/passkey-far --lengths 512,1k --depths 0,0.5 --samples 2",
    "diagnose model_cards/mamba2-base --length 1024 --sequences 2",
    "maps model_cards/mamba2-base --text import",
]
NOT_COMPARED = re.compile(r"(.*_)?(command|commit|device|digest|seconds|time|version|versions)")
"""Names of entries of a result that differ from run to run, or from place to place."""
READERS: dict[str, Callable[[Path], Any]] = {
    ".safetensors": load_file,
    ".json": lambda path: json.loads(path.read_text()),
    **dict.fromkeys((".bin", ".pth"), partial(torch.load, weights_only=True)),
    ".npz": lambda path: {name: torch.tensor(part) for name, part in np.load(path).items() if part.dtype.kind in "fi"},
}


def feed(digest: Any, value: Any) -> None:
    """Add tensors by their bytes, folders by the files that hold numbers, all else by what is printed."""
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Path):
        files = (file for file in sorted(value.iterdir()) if file.suffix in READERS)
        feed(digest, [(file.name, READERS[file.suffix](file)) for file in files])
    elif isinstance(value, dict):
        feed(digest, [(name, value[name]) for name in sorted(value) if not NOT_COMPARED.fullmatch(name)])
    elif isinstance(value, list | tuple):
        digest.update(f"[{len(value)}".encode())
        for one in value:
            feed(digest, one)
    else:
        digest.update(f"{value!r};".encode())


def random_ids(rows: int, length: int, seed: int = 2) -> Tensor:
    return torch.randint(3, 29, (rows, length), generator=torch.Generator().manual_seed(seed))


def results(model: Any, form: str) -> Any:
    """Logits, final state, and gradients of a number that depends on all of them; of generation the tokens."""
    inputs: dict[str, Any] = {"output_final_state": True}
    with torch.no_grad():
        read = model(random_ids(2, 3, seed=5), **inputs).final_state
    if form == "generated":
        ways = {"initial_state": read, "max_new_tokens": 6, "do_sample": False}
        return [model.generate(random_ids(2, 7), **ways, num_beams=beams) for beams in (1, 3)]
    if form == "padded":
        inputs["attention_mask"] = torch.tensor([[0] * 6 + [1] * (LENGTH - 6), [1] * (LENGTH - 11) + [0] * 11])
    if form == "packed":
        inputs["position_ids"] = torch.tensor([[*range(20), *range(LENGTH - 20)], [*range(9), *range(LENGTH - 9)]])
    if form == "checkpointed":
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
        model.train()
    if cache := getattr(model, "new_attention_cache", lambda: None)():
        inputs["attention_cache"] = cache
    carried = state = tuple(type(layer)(*(part.clone().requires_grad_() for part in layer)) for layer in read)
    embeds = model.get_input_embeddings()(random_ids(2, LENGTH)).detach().requires_grad_()
    outputs = []
    for part in embeds[:, :5].split(1, dim=1) if form == "single tokens" else [embeds]:
        output = model(inputs_embeds=part, initial_state=carried, **inputs)
        carried = output.final_state
        outputs.append(output.logits)
    found = [torch.cat(outputs, 1), *chain(*carried)]
    generator = torch.Generator().manual_seed(3)
    goal = torch.stack([(x * torch.randn(x.shape, generator=generator).to(x)).sum() for x in found]).sum()
    return found, torch.autograd.grad(goal, [embeds, *chain(*state), *model.parameters()], allow_unused=True)


def changed(digest: Any, family: Any, surgery: str) -> None:
    """A model after a surgery, or while it forgets."""
    model, change = build(family), SURGERIES[surgery]
    if isinstance(change, dict):
        with forgetting(model, **change):
            feed(digest, [results(model, form) for form in ("whole", "padded", "packed", "single tokens")])
    else:
        model = change(model) or model
        feed(digest, [results(model, "whole"), *model.parameters()])


def trained(digest: Any, name: str) -> None:
    """Losses, weights and files of states of a run of six steps, and of the same continued after three."""
    method, settings = RUNS[name]
    rows: Any = [{"input_ids": row, "labels": row.masked_fill(row % 3 == 0, -100)} for row in random_ids(24, 13)]
    for number, row in enumerate(rows if name == "tbtt on examples" else []):
        row["attention_mask"] = (torch.arange(13) <= 3 + number % 10).long()
        row["labels"] = row["labels"].masked_fill(row["attention_mask"] == 0, -100)
    rows = ContinuedChunks(random_ids(1, 24 * 9 + 1)[0], 9, chunks_before_reset=4) if name == "tbtt" else rows
    settings = settings | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 6}
    settings |= {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "logging_steps": 1, "save_steps": 3}
    with TemporaryDirectory() as folder:
        for output, resume in ((folder, None), (f"{folder}/again", f"{folder}/checkpoint-3")):
            config = getattr(trainers, f"{method}Config", trainers.InitialStateConfig)
            args = config(output, learning_rate=0.05, seed=3, **settings)
            trainer = getattr(trainers, f"{method}Trainer")(build(MAMBA2), args, train_dataset=rows)
            trainer.train(resume_from_checkpoint=resume)
            feed(digest, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
            for file in sorted(Path(output, "checkpoint-6").glob("*.safetensors")):
                feed(digest, [file.name, load_file(file)])


def converted(digest: Any, format: str, family: str) -> None:
    """The files of a tiny checkpoint of a format, as ours, and exported again."""
    with TemporaryDirectory() as folder:
        source, ours, back = (Path(folder, name) for name in ("source", "ours", "back"))
        write_tiny_random_model(format, family, source)
        convert_checkpoint(str(source), ours)
        export_checkpoint(str(ours), back, format)
        feed(digest, [source, ours, back])


def measured(digest: Any, line: str) -> None:
    """The files of numbers that a command writes about a shipped checkpoint."""
    with TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.environ["LENGTHGEN_CACHE"] = f"{folder}/cache"
        feed(digest, lengthgen([*line.split(), "--output", f"{folder}/out"]))
        feed(digest, Path(folder, "out"))


def cases() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Every case: its name, and what adds its results to a digest."""
    models = {f"{family.name}, {name}": partial(build, family, **family.variants[name]) for family, name in VARIANTS}
    for kind, window in product(SUPPORTED_TYPES, (None, WINDOW)):
        name = f"hybrid {kind}" + " with a window" * (window is not None)
        models[name] = lambda kind=kind, window=window: stateful(tiny_model(kind), attention_window=window)
    for (name, make), form in product(models.items(), FORMS):
        yield f"{name}: {form}", lambda digest, make=make, form=form: feed(digest, results(make(), form))
    yield from ((f"{f.name}: {how}", partial(changed, family=f, surgery=how)) for f in FAMILIES for how in SURGERIES)
    for format, kind in product(FORMATS, STATEFUL_CLASSES):
        yield f"{format} of {kind}", partial(converted, format=format, family=kind)
    yield from ((f"training: {name}", partial(trained, name=name)) for name in RUNS)
    yield from ((f"lengthgen {line}", partial(measured, line=line)) for line in COMMANDS)


def digest_of(compute: Callable[[Any], Any]) -> str:
    """The sha256 of what a case computes, or its error."""
    torch.manual_seed(0)
    digest = hashlib.sha256()
    try:
        compute(digest)
    except (Exception, SystemExit) as error:
        return f"error: {type(error).__name__}: {' '.join(str(error).split())[:150]}"
    return digest.hexdigest()


def main() -> int:
    """Write the digests, or compare them with written ones; 1 if any differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE", help="compute the digests and write them as JSON")
    what.add_argument("--compare", type=Path, metavar="FILE", help="compute the digests and say which differ")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose names match (default: all)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: digest_of(compute) for name, compute in cases() if re.search(options.only, name)}
    if options.write:
        options.write.write_text(json.dumps(found, indent=1) + "\n")
    before = json.loads((options.write or options.compare).read_text())
    names = sorted(name for name in {*before, *found} if re.search(options.only, name))
    pairs = {name: (before.get(name, "missing"), found.get(name, "missing")) for name in names}
    differ = {name: pair for name, pair in pairs.items() if pair[0].split(":")[:2] != pair[1].split(":")[:2]}
    for name, pair in differ.items():
        print(f"{name}: {pair[0]} -> {pair[1]}")
    errors = sum(digest.startswith("error") for digest in found.values())
    print(f"{len(differ)} of {len(pairs)} cases differ; {errors} are errors, such as what a family refuses")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
