"""The ratios that matter most, in minutes: one table, and which of them fell since they were last kept.

    python benchmarks/guard.py             # the table; the code is 1 if a ratio fell
    python benchmarks/guard.py --keep      # the same, and keep the ratios in ratios.json, beside this file
    python benchmarks/guard.py --json FILE # all rounds, for programs

Ratios are kept for each machine, since wider vectors or a faster memory speed up matrix products and everything else
differently. Those of bytes are the same everywhere; on a machine without kept ratios, one to theirs fell below half of
that of another, and shares of the limit are only shown. For more, --keep in a clone of the commit before a change.

Competitors take turns, on one thread. Times are seconds of the processor, so other work on the machine slows both
alike. "Limit" is what no change of ours can shorten: the projections of a layer, or a product of each matrix with
each token's vector.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from decoding import NEW, Generating, WeightReading
from decoding import models as decoders
from families import scan_pass
from forgetting import LENGTH as WINDOWED
from forgetting import passes as window_passes
from hybrids import delta_losses, mixer_passes
from mamba2 import loss_of, scans, training_passes
from measure import saved_bytes, times_of_turns
from torch import Tensor
from trainer_steps import LENGTH
from transformers.utils import logging

KEPT = Path(__file__).with_name("ratios.json")
SLACK = 0.05
"""A ratio fell if its median is this share below the least of the rounds that were kept."""
ELSEWHERE = 0.5
"""On a machine where none is kept, of a ratio to theirs; of a share of the limit nothing is asked."""
BYTES = ", bytes kept"
"""Ends the names of rows that are the same on every machine."""


class Row(NamedTuple):
    """Competitors by name: "ours", and "theirs", "limit" or both; each processes `tokens` when called."""

    name: str
    tokens: int
    competitors: dict[str, Callable[[], object]]


class Measured(NamedTuple):
    """Seconds of each competitor in each round, or bytes, once."""

    name: str
    tokens: int
    costs: Mapping[str, Sequence[float]]

    def ratios(self, other: str) -> list[float]:
        """How many times the seconds of ours the other takes, in each round: more is better for ours."""
        return [theirs / ours for theirs, ours in zip(self.costs.get(other, ()), self.costs["ours"], strict=False)]


def backwards(losses: dict[str, Callable[[], Tensor]]) -> dict[str, Callable[[], object]]:
    """Forward and backward of each."""
    return {name: lambda loss=loss: loss().backward() for name, loss in losses.items()}  # type: ignore[misc]


def rows() -> Iterator[Row]:
    """What is timed; models are made when their row is asked for."""
    yield Row("Mamba-2 scan, training", LENGTH, backwards(scans()[0]))
    passes, _ = training_passes()
    yield Row("Mamba-2 model, training", LENGTH, {**passes, "limit": passes["projections"]})
    losses, _ = delta_losses()
    yield Row("delta rule, training", LENGTH, backwards({name: losses[name] for name in ("ours", "theirs")}))
    passes, _ = mixer_passes()
    yield Row("Qwen3-Next mixer, training", LENGTH, {**passes, "limit": passes["projections_alone"]})
    gla, rwkv6 = (scan_pass(name)[0] for name in ("gla", "rwkv6"))
    yield Row("RWKV-6 scan (theirs: GLA), training", LENGTH, backwards({"ours": rwkv6, "theirs": gla}))
    passes = window_passes()
    runs: dict[str, Callable[[], object]] = {"ours": passes["theirs"], "theirs": passes["ours"]}
    yield Row("mamba2 scan, window (theirs: none)", WINDOWED, runs)
    for family in ("mamba2", "mamba", "gla", "rwkv6", "rwkv7"):
        competitors = decoders(family)
        for count in (1, 8):
            runs = {who: Generating(model, count) for who, model in competitors.items()}
            yield Row(
                f"{family} decoding, rows {count}",
                count * NEW,
                {**runs, "limit": WeightReading(competitors["ours"], count)},
            )
        if family == "mamba2":
            runs = {who: Generating(model, 1, LENGTH, 1) for who, model in competitors.items()}
            yield Row(f"{family} first token after {LENGTH:,}", LENGTH, runs)


def kept_bytes() -> Iterator[Measured]:
    """What a training pass keeps for its backward pass."""
    _, models = training_passes()
    sizes = {
        name: saved_bytes(lambda model=model: loss_of(model), model.parameters()) for name, model in models.items()
    }
    yield Measured(f"Mamba-2 model{BYTES}", 1, {name: [size] for name, size in sizes.items()})
    losses, inputs = delta_losses()
    sizes = {name: saved_bytes(losses[name], inputs) for name in ("ours", "theirs")}
    yield Measured(f"delta rule{BYTES}", 1, {name: [size] for name, size in sizes.items()})


def measured(rounds: int) -> Iterator[Measured]:
    """All rows."""
    for row in rows():
        chosen = {name: row.competitors[name] for name in ("ours", "theirs", "limit") if name in row.competitors}
        yield Measured(row.name, row.tokens, times_of_turns(rounds, chosen, time.process_time))
    yield from kept_bytes()


Ratios = dict[str, dict[str, float]]
"""Median and least of each ratio, by name."""
HEAD = ("", "ours", "theirs", "ratio", "rounds", "limit", "share")


def line(row: Measured) -> tuple[str, ...]:
    """Tokens/s (MiB for bytes) of each, the ratio to theirs with its range, and the share of the limit."""

    def figure(name: str) -> str:
        if name not in row.costs:
            return ""
        middle = statistics.median(row.costs[name])
        return f"{row.tokens / middle:,.0f}" if row.tokens > 1 else f"{middle / 2**20:,.0f} MiB"

    ratios, shares = row.ratios("theirs"), row.ratios("limit")
    return (
        row.name,
        figure("ours"),
        figure("theirs"),
        f"{statistics.median(ratios):.2f}x" if ratios else "",
        f"{min(ratios):.2f} to {max(ratios):.2f}" if len(ratios) > 1 else "",
        figure("limit"),
        f"{statistics.median(shares):.2f}" if shares else "",
    )


def summary(rows: list[Measured]) -> Ratios:
    """Median and least ratio of each row, to theirs and to the limit."""
    return {
        f"{row.name}, to {other}": {"median": statistics.median(ratios), "least": min(ratios)}
        for row in rows
        for other in ("theirs", "limit")
        if (ratios := row.ratios(other))
    }


def machine() -> str:
    """What ratios of times depend on: the processor, the instructions that torch uses, and torch."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    model = next(models, platform.processor() or platform.machine())
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def comparable(kept: dict[str, Ratios], here: str) -> Ratios:
    """The ratios kept on this machine. Where there are none, those of others, of which less is asked."""
    if here in kept:
        return kept[here]

    def asked(name: str) -> float:
        if BYTES in name:
            return 1
        return ELSEWHERE if name.endswith("theirs") else 0

    return {
        name: then | {"least": asked(name) * then["least"]} for rows in kept.values() for name, then in rows.items()
    }


def fallen(now: Ratios, kept: Ratios) -> list[str]:
    """What fell below the kept rounds, or is no longer measured, in words."""
    gone = [f"{name}: no longer measured" for name in kept if name not in now]
    return gone + [
        f"{name}: {now[name]['median']:.2f}, kept {then['median']:.2f} (least {then['least']:.2f})"
        for name, then in kept.items()
        if name in now and now[name]["median"] < (1 - SLACK) * then["least"]
    ]


def main() -> int:
    """Measure, print, compare, keep; 1 if a ratio fell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each competitor (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the seconds of all rounds")
    parser.add_argument("--keep", action="store_true", help=f"keep the ratios in {KEPT.name}")
    options = parser.parse_args()
    logging.set_verbosity_error()  # of kernels that a CPU has not
    torch.set_num_threads(1)  # seconds of the processor count threads that wait for others, too
    print(f"torch {torch.__version__}, load average {os.getloadavg()[0]:.1f}; tokens per second of a core\n")
    form = "{:40} {:>10} {:>10} {:>8} {:>14} {:>10} {:>6}"
    print(form.format(*HEAD), flush=True)
    results = []
    for row in measured(options.rounds):
        results.append(row)
        print(form.format(*line(row)), flush=True)
    if options.json:
        options.json.write_text(json.dumps([row._asdict() for row in results], indent=1) + "\n", encoding="utf-8")
    now, here = summary(results), machine()
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
    fell = fallen(now, comparable(kept, here))
    if options.keep:
        KEPT.write_text(json.dumps(kept | {here: now}, indent=1) + "\n", encoding="utf-8")
    if here not in kept:
        print(f"\nNo ratios are kept for this machine ({here}): those of others are compared, and roughly.")
    print("\n" + ("Fell:\n" + "\n".join(fell) if fell else "No ratio fell."))
    return int(bool(fell))


if __name__ == "__main__":
    raise SystemExit(main())
