"""Repeat the studies of this folder, two commands at a time with one thread each.

Each command stores its models and results as files, and continues where it was interrupted: run the same again.
Hours are for two idle cores, estimated from the seconds of the trainings.

    python examples/evidence.py --list          # the studies, their questions, and how long they take
    python examples/evidence.py families        # one of them
    python examples/evidence.py                 # all
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

EXAMPLES = Path(__file__).resolve().parent
DELTA_RULE = (
    *("rwkv7", "rwkv7_default", "delta_net", "delta_net_negative", "gated_deltanet", "gated_deltanet_negative"),
    *("gated_deltanet_default", "kda", "qwen3_next"),
)
FAMILIES = (
    *("mamba2", "mamba2_default", "mamba2_large_default", "mamba2_long_default", "mamba", "mamba_default"),
    *("falcon_mamba", "gla", "rwkv6", "rwkv6_default", "rwkv5", "rwkv5_default", "hgrn2", "bamba"),
    *(*DELTA_RULE, *(f"{name}_short" for name in DELTA_RULE)),
)
SEEDS = ("0", "1", "2")


class Study(NamedTuple):
    """A study: its question, commands that can run in parallel, one that reports at the end, hours on two cores."""

    question: str
    commands: Sequence[str]
    report: str
    hours: float


STUDIES = {
    "families": Study(
        "Do all families fail beyond their training length, and what restores length generalization?",
        [
            *(f"families/run.py --families {family}" for family in FAMILIES),
            "families/run.py --families mamba2 gla --methods fitted_noise_first fitted_noise_first_zero",
            "families/shipped.py",
        ],
        "families/run.py --report",
        5.5,
    ),
    "hybrids": Study(
        "What removes the excess loss of long attention?",
        [f"hybrids/run.py --seeds {seed}" for seed in SEEDS],
        "hybrids/run.py --report",
        2.5,
    ),
    "failure": Study(
        "When does a model begin to fail in its training, and how few further steps restore it?",
        [f"failure/run.py --seeds {seed}" for seed in SEEDS],
        "failure/run.py --report",
        1.1,
    ),
    "interventions": Study(
        "What does each intervention restore and cost, after how few steps, at which learning rate?",
        [
            *(f"interventions/run.py --seeds {seed}" for seed in SEEDS),
            *(f"interventions/budget.py --bases {base}" for base in ("delta_net", "mamba2")),
        ],
        "interventions/run.py --report",
        1.0,
    ),
    "learned_state": Study(
        "What can a learned initial state learn, compared with LoRA?",
        ["learned_state/run.py", "learned_state/s0.py"],
        "learned_state/run.py --report",
        0.4,
    ),
    "forgetting": Study(
        "Does forgetting at inference help, and how much?",
        [*(f"forgetting/run.py --seeds {seed}" for seed in SEEDS), "forgetting/scales.py"],
        "forgetting/run.py --report",
        0.4,
    ),
    "state_expansion": Study(
        "Does a larger state help after training, and with which initialization?",
        [
            "state_expansion/run.py --bases mamba2_mimetic",
            "state_expansion/run.py --bases mamba2_heads --seeds 0 1 2",
            *(f"state_expansion/run.py --bases {base} --seeds 0 1 2" for base in ("gla", "heads")),
            *(f"state_expansion/depth.py --families {family}" for family in ("mamba2", "gla")),
        ],
        "state_expansion/run.py --report",
        1.5,
    ),
    "alignment": Study(
        "What can the alignment loss do, alone, with state passing, and for a Transformer?",
        ["alignment/llama.py", *(f"alignment/run.py --seeds {seed}" for seed in SEEDS)],
        "alignment/run.py --report",
        0.9,
    ),
    "passkey": Study(
        "How does a model learn to retrieve passkeys far beyond its training length?",
        [
            *(
                f"passkey/{script}.py --seeds {seed}"
                for script in ("run", "other_families", "windows", "questions")
                for seed in SEEDS
            ),
            *("passkey/chunks.py", "passkey/keys.py", "passkey/new_task.py", "passkey/mixing.py"),
        ],
        "passkey/run.py --report",
        8.4,
    ),
    "mimetic": Study(
        "Does mimetic initialization help to copy and recall, and which part of it?",
        [
            *(f"mimetic/run.py --seeds {seed}" for seed in SEEDS),
            *(f"mimetic/run.py --studies rates tasks --families mamba --seeds {seed}" for seed in SEEDS),
            *(f"mimetic/packed.py --seeds {seed}" for seed in SEEDS),
        ],
        "mimetic/run.py --report",
        3.3,
    ),
    "published": Study(
        "Does a published model fail, and what restores length generalization? (requires --weights, see its README)",
        [f"published/run.py --seeds {seed}" for seed in SEEDS],
        "published/run.py --report",
        0.1,
    ),
    "scaling_laws": Study(
        "How long must a training sequence be for a state of a given size?",
        [
            *(f"scaling_laws/run.py --task {task}" for task in ("text", "needle")),
            *(f"scaling_laws/forgetting.py --seeds 0 --sizes {size} --lengths 16 32 64 128" for size in (4, 16, 64)),
        ],
        "scaling_laws/run.py --report",
        1.6,
    ),
}


def table() -> str:
    """The studies as text."""
    width = max(map(len, STUDIES))
    return "\n".join(f"{name:{width}}  {study.hours:4.1f} h  {study.question}" for name, study in STUDIES.items())


def run(name: str, logs: Path, workers: int) -> bool:
    """Run the commands of a study and its report; whether all succeeded. Stops the commands on an interrupt."""
    study, failed = STUDIES[name], False
    waiting = list(enumerate(study.commands))
    running: dict[subprocess.Popen, tuple[str, Path, IO[str]]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                number, words = waiting.pop(0)
                log = logs / f"{name}-{number}.log"
                print(f"{words}  (log: {log})", flush=True)
                file = log.open("w", encoding="utf-8")
                running[start(words, file)] = words, log, file
            for process in [process for process in running if process.poll() is not None]:
                words, log, file = running.pop(process)
                file.close()
                if process.returncode:
                    failed = True
                    print(f"{words} failed with code {process.returncode}: see {log}", flush=True)
            time.sleep(0.2)
        return start(study.report, None).wait() == 0 and not failed
    finally:
        for process in running:
            process.terminate()


def start(words: str, log: IO[str] | None) -> subprocess.Popen:
    """A command of a study with one thread."""
    script, *options = shlex.split(words)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / script), *options], env=environment, stdout=log, stderr=log
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"some of {', '.join(STUDIES)} (default: all)")
    parser.add_argument("--list", action="store_true", help="list the studies and run nothing")
    parser.add_argument(
        "--logs", default="demo-output/evidence", help="folder for the output of commands (%(default)s)"
    )
    parser.add_argument("--workers", type=int, default=2, help="commands that run at a time (%(default)s)")
    options = parser.parse_args()
    if unknown := [name for name in options.studies if name not in STUDIES]:
        parser.error(f"there is no study {', '.join(unknown)}: choose from {', '.join(STUDIES)}")
    if options.workers < 1:
        parser.error(f"--workers must be at least 1, got {options.workers}")
    if options.list:
        print(table())
        return 0
    logs = Path(options.logs)
    logs.mkdir(parents=True, exist_ok=True)
    try:
        failed = [name for name in options.studies or STUDIES if not run(name, logs, options.workers)]
    except KeyboardInterrupt:
        print("\nStopped. The same command continues where it stopped.")
        return 130
    if failed:
        print(f"Not finished: {', '.join(failed)}. The same command runs what is missing.")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
