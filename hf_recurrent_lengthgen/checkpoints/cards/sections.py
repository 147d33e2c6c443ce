"""Sections of a card: what a checkpoint is, how to use it, how it was made, and its limits."""

import json
import shlex
from collections.abc import Sequence

from hf_recurrent_lengthgen.checkpoints.cards.facts import Checkpoint, Evidence
from hf_recurrent_lengthgen.checkpoints.cards.markdown import code, escape, fence, link, table
from hf_recurrent_lengthgen.checkpoints.cards.metadata import PACKAGE
from hf_recurrent_lengthgen.checkpoints.cards.results_section import (
    FOLDERS,
    not_found,
    own_evaluations,
    retrieval_results,
    uniform_loss,
    versions_text,
)
from hf_recurrent_lengthgen.checkpoints.cards.trainings import trainings_table
from hf_recurrent_lengthgen.checkpoints.methods import Method
from hf_recurrent_lengthgen.checkpoints.records import Source, Step
from hf_recurrent_lengthgen.metrics.context_harm.result import EvaluationResult
from hf_recurrent_lengthgen.metrics.context_harm.words import status
from hf_recurrent_lengthgen.models import family_config
from hf_recurrent_lengthgen.models.configuration_stateful import TESTED
from hf_recurrent_lengthgen.models.scan_forgetting import Forgetting, in_words


def summary(checkpoint: Checkpoint) -> str:
    """A paragraph on what the model is and how it was made."""
    lineage, config_class = checkpoint.lineage, family_config(checkpoint.model_type)
    family = checkpoint.model_type if config_class is None else str(config_class.name_of(checkpoint.config))
    dtype = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    stored = f" in {escape(dtype)}" if isinstance(dtype, str) else ""
    what = f"A recurrent language model ({escape(family)}, {checkpoint.parameters:,} parameters{stored})"
    if lineage is None:
        return f"{what}. {_unrecorded(checkpoint)}"
    if lineage.source is None:
        trained = any(step.kind == "train" for step in lineage.steps)
        what += ", trained from scratch" if trained else ", from an unrecorded source"
    else:
        what += f", made from {_source(lineage.source)}"
    done = [_step_in_words(step) for step in lineage.steps if step.kind not in ("convert", "merge")]
    steps = f": {', then '.join(done)}." if done else "."
    return " ".join([what + steps, *(_sentence(method) for method in checkpoint.methods if method.sentence)])


def _sentence(method: Method) -> str:
    paper = method.paper
    cited = "" if paper is None else f" ({link(escape(paper.name), paper.address)})"
    return f"{escape(method.sentence)}{cited}."


def _unrecorded(checkpoint: Checkpoint) -> str:
    done = checkpoint.config.get("interventions")
    if not isinstance(done, list) or not done:
        return "How it was made is not recorded."
    return f"How it was made is recorded only in its config.json: {escape('; '.join(map(str, done)))}."


def _source(source: Source) -> str:
    if not source.on_hub:
        return f"the checkpoint {code(source.name)}"
    return link(escape(source.name), f"https://huggingface.co/{source.name}")


def _step_in_words(step: Step) -> str:
    run = step.training
    if run is None:
        given = "" if step.tokenizer is None else f", with the tokenizer {step.tokenizer}"
        return escape(step.description + given)
    titles = " with ".join(method.title for method in run.methods)
    of = "" if run.adapter is None else " of an adapter"
    number = next(
        (f"{run.tokens / size:.1f} {name}" for size, name in _LARGE if run.tokens >= size), f"{run.tokens:,}"
    )
    return f"{escape(titles)}{of} ({run.steps:,} steps, {number} tokens)"


_LARGE = ((10**9, "billion"), (10**6, "million"))


def use_section(checkpoint: Checkpoint, place: str, on_hub: bool) -> str:
    """How to load it, generate, continue from a state, and train it further; the code loads `place`."""
    where, ours = json.dumps(place), checkpoint.carries_code
    trusted = ", trust_remote_code=True" if ours else ""  # AutoTokenizer needs it, too
    names = ["AutoModelForCausalLM"] * ours + ["AutoTokenizer"] * checkpoint.tokenizer
    load = ["import torch", *([f"from transformers import {', '.join(names)}"] if names else []), ""]
    if ours:
        intro = (
            f"With torch and Transformers {TESTED}; the checkpoint carries the code of its model class "
            f"({code('trust_remote_code=True')})."
        )
        if on_hub:
            intro += f" To pin this code, pass {code('revision=')} with a commit to both calls."
        load += [f"model = AutoModelForCausalLM.from_pretrained({where}{trusted})"]
    else:
        intro = f"With {code(PACKAGE)}, which adds states to the model."
        load += [f"from {PACKAGE} import load_model", "", f"model = load_model({where})"]
    if checkpoint.tokenizer:
        load += [f"tokenizer = AutoTokenizer.from_pretrained({where}{trusted})"]
    generate = [_prompt("prompt", "Once upon a time", checkpoint), *_generate("prompt", "", checkpoint)]
    parts = [
        intro,
        fence("\n".join([*load, "", *generate]), "python"),
        "Read a text once, and continue from its state as often as you like:",
        fence("\n".join(_continue(checkpoint)), "python"),
        _train_further(checkpoint, place),
    ]
    return "\n\n".join(parts)


def _prompt(name: str, text: str, checkpoint: Checkpoint) -> str:
    if checkpoint.tokenizer:
        return f'{name} = tokenizer("{text}", add_special_tokens=False, return_tensors="pt")'
    return f'{name} = {{"input_ids": torch.tensor([[3, 4, 5]])}}  # the checkpoint has no tokenizer'


def _generate(prompt: str, further: str, checkpoint: Checkpoint) -> list[str]:
    shown = "tokenizer.decode(tokens[0])" if checkpoint.tokenizer else "tokens[0]"
    return [f"tokens = model.generate(**{prompt}{further}, max_new_tokens=40)", f"print({shown})"]


def _continue(checkpoint: Checkpoint) -> list[str]:
    # load_model wraps the stock class of other families
    wrapped = not checkpoint.model_type.startswith("stateful_") and family_config(checkpoint.model_type) is None
    cache = ["cache = model.new_attention_cache()  # keys and values, if it has attention layers"] * wrapped
    keys = ", attention_cache=cache" * wrapped
    read = f"{keys}, output_final_state=True" if wrapped else ""
    return [
        _prompt("text", "A text that may be long. ", checkpoint),
        *cache,
        "with torch.no_grad():",
        f"    state = model(**text{read}).final_state  # what it keeps of the text",
        _prompt("question", "It says", checkpoint),
        *_generate("question", f", initial_state=state{keys}", checkpoint),
    ]


def _train_further(checkpoint: Checkpoint, place: str) -> str:
    if checkpoint.forgets != Forgetting():
        return (
            "It cannot be trained as it is: train the checkpoint that it was made from, and make it forget afterwards "
            f"({code('lengthgen forget')})."
        )
    length = f" --training-length {checkpoint.training_length}" if checkpoint.training_length else ""
    command = f"lengthgen train --model {shlex.quote(place)}{length} --data YOUR_TEXT.txt --output further"
    return f"To train it further, with {code(PACKAGE)}:\n\n{fence(command, 'bash')}"


def making_section(checkpoint: Checkpoint, license: str | None) -> str:
    """Source, steps, settings, commands and versions."""
    lineage = checkpoint.lineage
    if lineage is None:
        licensed = "" if license is None else f" License: {escape(license)}."
        return f"{_unrecorded(checkpoint)}{licensed}"
    parts = []
    if lineage.source is not None:
        source = lineage.source
        revision = f", revision {code(source.revision)}" if source.revision else ", revision unknown"
        given = escape(source.license) if source.license else "unknown"
        layout = f"in the layout of {escape(source.format)}"
        parts.append(f"Made from {_source(source)}{revision}, {layout}. License of the source: {given}.")
    parts.append("\n".join(f"{number}. {_step_in_words(step)}" for number, step in enumerate(lineage.steps, 1)))
    trainings = {number: step.training for number, step in enumerate(lineage.steps, 1) if step.training is not None}
    if trainings:
        parts.append(trainings_table(trainings))
    if commands := list(dict.fromkeys(step.command for step in lineage.steps if step.command)):
        parts += ["Commands:" if len(commands) > 1 else "Command:", fence("\n".join(commands), "bash"), FOLDERS]
    if versions := list(dict.fromkeys(versions_text(step.versions) for step in lineage.steps if step.versions)):
        parts.append(f"Made with {escape('; '.join(versions))}.")
    if license is not None:
        parts.append(f"License: {escape(license)}.")
    parts.append(_verified(checkpoint))
    return "\n\n".join(part for part in parts if part)


def _verified(checkpoint: Checkpoint) -> str:
    verification = checkpoint.verification
    if verification is None:
        return ""
    rows = [["Check", "against", "tokens", "difference", "allowed"]]
    rows += [
        [
            escape(check.what),
            escape(check.against),
            f"{check.tokens:,}",
            f"{check.difference:.2g}{'' if check.passed else ' (too large)'}",
            f"{check.tolerance:g}",
        ]
        for check in verification.checks
    ]
    return f"Checks of these files by {code('lengthgen verify')}:\n\n{table(rows, numbers=False)}"


def limits_section(checkpoint: Checkpoint, evidence: Sequence[Evidence], license: str | None) -> str:
    """Known failures, and what was not measured."""
    limits = [*_failures(checkpoint, evidence), *_unmeasured(checkpoint, evidence)]
    if license is None:
        limits.append("The license is unknown.")
    return "\n".join(f"- {sentence}" for sentence in limits)


def _failures(checkpoint: Checkpoint, evidence: Sequence[Evidence]) -> list[str]:
    failures = []
    for result in own_evaluations(evidence):
        failures += _failures_of(result, checkpoint.vocab_size)
    for retrieved in retrieval_results(evidence):
        failures += [f"Known failure: {sentence}." for sentence in not_found(retrieved)[:1]]
    if (rule := checkpoint.forgets) != Forgetting():
        failures.append(
            f"It is made to forget at inference ({escape(in_words(rule))}): it cannot use what it forgets."
        )
    kinds = [step.kind for step in checkpoint.steps]
    if "expand" in kinds and "train" not in kinds[kinds.index("expand") :]:
        failures.append("Its states were expanded, and it was not trained afterwards.")
    if checkpoint.verification is not None and not checkpoint.verification.passed:
        failures.append("It did not pass its verification.")
    if "train" in kinds:
        failures.append("Each training is a single run with one seed.")
    return failures


def _failures_of(result: EvaluationResult, vocab_size: int | None) -> list[str]:
    failures, unit, verdict = [], result.data.token_unit, result.verdict
    start = result.harm.harmful_from
    if (guess := uniform_loss(result, vocab_size)) is not None:
        failures.append(
            f"Known failure: its loss is not below {guess:.3f}, the loss of a uniform guess among all tokens."
        )
    if status(result) != "breaks" and start is not None:
        failures.append(f"Known failure: at some positions from {start:,} on, earlier text increases its loss.")
    if status(result) == "breaks":
        failures.append(
            "Known failure: on longer texts it predicts worse than with only the last "
            f"{result.training_length:,} {unit}s" + (f", from position {start:,} on." if start else ".")
        )
    if verdict.violated_from is not None:
        failures.append(
            f"Known failure: from position {verdict.violated_from:,} on, its perplexity is more than "
            f"{verdict.tolerance:.0%} above the best one inside its training length."
        )
    elif verdict.holds_to < result.evaluated_length:
        failures.append(
            f"Its mean perplexity at some positions from {verdict.holds_to:,} on is more than "
            f"{verdict.tolerance:.0%} above the best one, but the intervals do not confirm this (Definition 3.2)."
        )
    if result.in_window.context_use.low is None or result.in_window.context_use.low <= 0:
        failures.append("It is not shown to use the context inside its training length.")
    return failures


def _unmeasured(checkpoint: Checkpoint, evidence: Sequence[Evidence]) -> list[str]:
    evaluated, retrieved = own_evaluations(evidence), retrieval_results(evidence)
    unmeasured = []
    if not evaluated:
        unmeasured.append("This card has no loss on long texts, so it does not show how far the model holds.")
    for result in evaluated:
        unmeasured.append(
            f"Measured on {result.sequences} texts of one dataset ({escape(result.data.source.name)}), "
            f"up to {result.evaluated_length:,} {result.data.token_unit}s; other data and longer texts are unknown."
        )
    if not retrieved:
        unmeasured.append(
            "Retrieval from far back in a text (passkeys, needles) was not measured; low loss does not imply it."
        )
    unmeasured.append(
        "This card has no standard benchmarks, and no check for harmful or false content in generated texts."
    )
    if checkpoint.verification is None:
        unmeasured.append(f"These files were not verified ({code('lengthgen verify')}).")
        if evidence:
            unmeasured.append("The results are of these weights, but not certainly of this config.")
    if not checkpoint.tokenizer:
        unmeasured.append("It has no tokenizer.")
    if checkpoint.lineage is None:
        unmeasured.append("Its training data and the length of its training are not recorded.")
    return unmeasured


def citation_section(checkpoint: Checkpoint, version: str) -> str:
    """BibTeX of the methods' papers and of this package."""
    papers = list(dict.fromkeys(method.paper for method in checkpoint.methods if method.paper))
    package = f"""\
@software{{{PACKAGE},
  title = {{{{{PACKAGE}}}: recurrent language models that keep working beyond their training length}},
  version = {{{version}}}
}}"""
    return fence("\n\n".join([*(paper.bibtex for paper in papers), package]), "bibtex")
