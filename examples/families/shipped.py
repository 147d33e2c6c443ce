"""Three cheap measurements of the papers, on the pairs of model_cards/.

    python examples/families/shipped.py        # three minutes of one core; continues where it stopped

- Effective Remembrance after 4 T bytes (arXiv:2507.02782, Definition 3.3) in three distances, and whether they rank
  the points of the text alike (appendix G, Fig. 13): Spearman's coefficient over the points.
- The "newlines" prompt (arXiv:2410.07145, appendices G and I), read to 64 T.
- Sizes of states and models (Fig. 12 there).
- The rule of T_forget (section 4.2 there) on the evaluations of the cards: is a loss beyond T above twice the largest
  within T?

Writes results/shipped.json, and the tables of README.md. Pairs whose weights changed are measured again.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

from hf_recurrent_lengthgen.checkpoints.loading import load_language_model
from hf_recurrent_lengthgen.cli.inputs import load_stream
from hf_recurrent_lengthgen.data import byte_tokenizer, evaluation_sequences
from hf_recurrent_lengthgen.evaluation.provenance import model_record
from hf_recurrent_lengthgen.evaluation.settings import EvaluationSettings
from hf_recurrent_lengthgen.evaluation.streaming import state_elements
from hf_recurrent_lengthgen.metrics import read_result
from hf_recurrent_lengthgen.metrics.context_harm.result import Comparison
from hf_recurrent_lengthgen.metrics.remembrance.measure import DISTANCES, effective_remembrance
from hf_recurrent_lengthgen.metrics.repeated_token import constant_prompt, single_token

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scaling_laws"))
from scaling_laws import loss_ratio
from study_pages import fill, markdown

HERE, ROOT = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]
TEXTS, LENGTHS, POINTS = 8, 64, 32
KINDS, LABELS = ("base", "state-passing"), ("base", "after state passing")
Results = dict[str, dict[str, Any]]


def measured(path: Path, lengths: int, kept: dict[str, Any] | None) -> dict[str, Any]:
    """The numbers of a checkpoint; `kept` if it is of the same weights."""
    model: Any = load_language_model(str(path))
    weights = model_record(model)["weights"]
    if kept is not None and kept["weights"] == weights:
        return kept
    training_length, tokenizer = model.config.training_length, byte_tokenizer()
    texts = evaluation_sequences(load_stream("stdlib", "validation", tokenizer).tokens, TEXTS, 4 * training_length)
    starts = [4 * training_length * point // POINTS for point in range(POINTS)]
    names, settings = list(DISTANCES)[1:], EvaluationSettings(progress=False)
    found = effective_remembrance(model, texts, training_length, settings, starts=starts, distances=names)
    token: Any = single_token(tokenizer)
    newlines = constant_prompt(model, token, training_length, lengths * training_length, progress=False)
    drifting = None if newlines.states is None else [len(newlines.states.drifting), len(newlines.states.heads)]
    return {
        "weights": weights,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state": state_elements(model),
        "remembrance": {name: [round(value.mean, 6) for value in values] for name, values in found.distances.items()},
        "newlines": {"inside": round(newlines.inside, 4), "beyond": round(newlines.beyond, 4)},
        "fails_from": newlines.exceeded_from,
        "drifting": drifting,
    }


def rank_correlation(results: list[dict[str, Any]], other: str) -> float:
    """Spearman's coefficient of total variation with another distance, over all points of some checkpoints."""
    both = [
        [value for result in results for value in result["remembrance"][name]] for name in ("total_variation", other)
    ]
    return float(spearmanr(*both).statistic)


def tables(results: Results) -> dict[str, str]:
    """The tables by their names in README.md."""
    pairs = {
        name.removesuffix("-base"): [results[name], results.get(f"{name.removesuffix('-base')}-state-passing")]
        for name in results
        if name.endswith("-base")
    }
    pairs = {name: pair for name, pair in pairs.items() if None not in pair}
    distances, prompts = [], []
    for name, pair in pairs.items():
        beyond = [each["remembrance"]["total_variation"][POINTS * 3 // 4] for each in pair]
        coefficients = [[f"{rank_correlation([each], other):.3f}" for each in pair] for other in list(DISTANCES)[1:]]
        distances.append([name, ", ".join(f"{value:.2f}" for value in beyond), *map(", ".join, coefficients)])
        base = pair[0]
        cells = [f"{each['newlines']['inside']:.2g} / {each['newlines']['beyond']:.2g}" for each in pair]
        drifting = [f"{each['drifting'][0]} of {each['drifting'][1]}" for each in pair]
        prompts.append([name, f"{base['parameters']:,}", f"{base['state']:,}", *cells, *drifting])
    everything = [each for pair in pairs.values() for each in pair]
    pooled = [f"{rank_correlation(everything, other):.3f}" for other in list(DISTANCES)[1:]]
    distances.append(["all together", "", *pooled])
    head = ["pair: base, after state passing", "total variation at 3 T of 4 T"]
    return {
        "distances": markdown([*head, "rank correlation with Jensen-Shannon", "with cosine"], distances),
        "newlines": markdown(
            ["pair", "parameters", "state elements"]
            + [f"{what}, {kind}" for what in ("loss within / beyond T", "heads that drift") for kind in LABELS],
            prompts,
        ),
    }


def rule(pairs: Sequence[str]) -> str:
    """A row for each pair: largest loss beyond T over the largest within it, with and without the first quarter."""
    rows = []
    for name in pairs:
        card = ROOT / "model_cards" / f"{name}-base" / "results" / "comparison.json"
        models = {model.role: model.evaluation for model in read_result(card, Comparison).models}
        both = [models["base"], models["intervention"]]
        cells = [", ".join(f"{model.harm.last.mean:+.2f}" for model in both)]
        for skip in (None, 0.25):
            ratios = [loss_ratio(model.position_wise.coarse, model.training_length, skip) for model in both]
            cells.append(", ".join(f"{ratio:.2f}" for ratio in ratios))
        rows.append([name, *cells])
    head = ["pair: base, after state passing", "excess loss in the last doubling", "largest loss beyond / within T"]
    return markdown([*head, "the same without the first T/4"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", help="names in model_cards/ without -base; all by default")
    parser.add_argument("--lengths", type=int, default=LENGTHS, help="of the newlines prompt, in training lengths")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of shipped.json")
    parser.add_argument("--page", type=Path, default=HERE / "README.md", help="page with the tables")
    options = parser.parse_args()
    shipped = sorted(
        path.name.removesuffix("-state-passing") for path in (ROOT / "model_cards").glob("*-state-passing")
    )
    file = options.results / "shipped.json"
    results: Results = json.loads(file.read_text()) if file.is_file() else {}
    for name in (f"{pair}-{kind}" for pair in options.pairs or shipped for kind in KINDS):
        results[name] = measured(ROOT / "model_cards" / name, options.lengths, results.get(name))
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(results.items()))
        file.write_text(f"{{{lines}}}\n")
        print(name, results[name]["newlines"], results[name]["drifting"], flush=True)
    fill(options.page, {**tables(dict(sorted(results.items()))), "rule": rule(shipped)})


if __name__ == "__main__":
    main()
