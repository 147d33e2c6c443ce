"""Effective rank of the states of the pairs of model_cards/, at the training length T and at 64 T.

    python examples/families/state_ranks.py        # five minutes of one core; continues where it stopped

Writes results/state_ranks.json, and the table of docs/read_a_diagnosis.md from it. Four held-out texts for each model.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from hf_recurrent_lengthgen.checkpoints.loading import load_language_model
from hf_recurrent_lengthgen.cli.inputs import load_stream
from hf_recurrent_lengthgen.data import byte_tokenizer, evaluation_sequences
from hf_recurrent_lengthgen.evaluation.streaming import stream_nll
from hf_recurrent_lengthgen.metrics.states.measure import describe_states
from hf_recurrent_lengthgen.metrics.states.result import StateDiagnosis
from hf_recurrent_lengthgen.metrics.states.summary import LOW_RANK
from hf_recurrent_lengthgen.metrics.states.trajectory import StateObserver, sample_positions

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from study_pages import fill, markdown

HERE, ROOT = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]
TEXTS, LENGTHS = 4, 64
KINDS = ("base", "state-passing")


def measured(path: Path, lengths: int) -> dict[str, Any]:
    """Means over heads at T and at `lengths` T, [at T, at the end], and drifting heads apart from the others there."""
    model: Any = load_language_model(str(path))
    training_length = model.config.training_length
    length = lengths * training_length
    texts = evaluation_sequences(load_stream("stdlib", "validation", byte_tokenizer()).tokens, TEXTS, length + 1)
    observer = StateObserver(model, TEXTS, sample_positions(length, training_length))
    with observer:
        stream_nll(model, texts, progress=False, observer=observer)
    found = describe_states(model, observer.trajectory(), training_length)
    ends = (found.last_inside, -1)
    return {
        "matrices": len(found.ranks),
        "most": fmean(rank.most for rank in found.ranks),
        "low": [
            sum(rank.counted[place] < LOW_RANK * min(rank.most, found.positions[place]) for rank in found.ranks)
            for place in ends
        ],
        "counted": [round(fmean(rank.counted[place] for rank in found.ranks), 2) for place in ends],
        "entropy": [round(fmean(rank.entropy[place] for rank in found.ranks), 2) for place in ends],
        "drifting": _entropy_of(found, drifts=True),
        "steady": _entropy_of(found, drifts=False),
    }


def _entropy_of(found: StateDiagnosis, drifts: bool) -> list[float] | None:
    """Mean effective rank by entropy of the heads that drift, or do not, at T and at the end, if there are any."""
    places = {(head.layer, head.head) for head in found.drifting}
    ranks = [rank for rank in found.ranks if rank.head is not None and ((rank.layer, rank.head) in places) == drifts]
    return [round(fmean(rank.entropy[n] for rank in ranks), 2) for n in (found.last_inside, -1)] if ranks else None


def table(results: dict[str, dict[str, Any]]) -> str:
    """A row for each pair; each cell has the value at T and at 64 T, of the base and after state passing."""

    def both(name: str, what: str, digits: int = 1) -> list[str]:
        ends = [results[f"{name}-{kind}"][what] for kind in KINDS]
        return ["" if end is None else f"{end[0]:.{digits}f}, {end[1]:.{digits}f}" for end in ends]

    names = [name.removesuffix("-base") for name in results if name.endswith("-base")]
    rows = []
    for name in (name for name in names if f"{name}-state-passing" in results):
        base = results[f"{name}-base"]
        cells = [*both(name, "counted"), *both(name, "entropy"), *both(name, "low", 0)]
        rows.append([name, str(base["matrices"]), f"{base['most']:g}", *cells])
    heads = ["pair", "matrices", "largest rank"]
    heads += [f"{what}, {kind}" for what in ("counted", "entropy", "low") for kind in ("base", "after state passing")]
    return markdown(heads, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", help="names without -base, measured again; default: all without result")
    parser.add_argument("--lengths", type=int, default=LENGTHS, help="length of the texts in training lengths")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of state_ranks.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/read_a_diagnosis.md", help="page with the table")
    options = parser.parse_args()
    shipped = sorted(
        path.name.removesuffix("-state-passing") for path in (ROOT / "model_cards").glob("*-state-passing")
    )
    kept = options.results / "state_ranks.json"
    results = json.loads(kept.read_text()) if kept.is_file() else {}
    for name in (f"{pair}-{kind}" for pair in options.pairs or shipped for kind in KINDS):
        if options.pairs or name not in results:
            results[name] = measured(ROOT / "model_cards" / name, options.lengths)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
            print(name, results[name], flush=True)
    fill(options.page, {"state ranks": table(dict(sorted(results.items())))})


if __name__ == "__main__":
    main()
