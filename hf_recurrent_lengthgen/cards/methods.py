"""The methods that a lineage may name: what they are in words, their tags, and the papers they come from."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from hf_recurrent_lengthgen.records import Lineage, Step


class Paper(NamedTuple):
    """A paper: how it is named in text, its number on arXiv, and its BibTeX entry."""

    name: str
    arxiv: str
    bibtex: str

    @property
    def address(self) -> str:
        return f"https://arxiv.org/abs/{self.arxiv}"


class Method(NamedTuple):
    """A method: its name in text, a sentence of what it does, a tag for the Hub, its paper."""

    title: str
    sentence: str
    tag: str | None
    paper: Paper | None


def _paper(name: str, arxiv: str, key: str, title: str, authors: str) -> Paper:
    year = f"20{arxiv[:2]}"
    bibtex = f"""\
@article{{{key},
  title = {{{title}}},
  author = {{{authors}}},
  journal = {{arXiv preprint arXiv:{arxiv}}},
  year = {{{year}}}
}}"""
    return Paper(name, arxiv, bibtex)


UNEXPLORED_STATES = _paper(
    "Buitrago and Gu, 2025",
    "2507.02782",
    "buitrago2025understanding",
    "Understanding and Improving Length Generalization in Recurrent Models",
    "Buitrago Ruiz, Ricardo and Gu, Albert",
)
STUFFED_MAMBA = _paper(
    "Chen et al., 2024",
    "2410.07145",
    "chen2024stuffed",
    "Stuffed Mamba: Oversized States Lead to the Inability to Forget",
    "Chen, Yingfa and Zhang, Xinrong and Hu, Shengding and Han, Xu and Liu, Zhiyuan and Sun, Maosong",
)
STATEX = _paper(
    "Shen et al., 2025",
    "2509.22630",
    "shen2025statex",
    "{StateX}: Enhancing {RNN} Recall via Post-training State Expansion",
    "Shen, Xingyu and Chen, Yingfa and Thai, Zhen Leng and Han, Xu and Liu, Zhiyuan and Sun, Maosong",
)
MIMETIC = _paper(
    "Trockman et al., 2024",
    "2410.11135",
    "trockman2024mimetic",
    "Mimetic Initialization Helps State Space Models Learn to Recall",
    "Trockman, Asher and Harutyunyan, Hrayr and Kolter, J. Zico and Kumar, Sanjiv and Bhojanapalli, Srinadh",
)
ALIGNMENT = _paper(
    "Du et al., 2025",
    "2506.11769",
    "du2025longshort",
    "Long-Short Alignment for Effective Long-Context Modeling in {LLMs}",
    "Du, Tianqi and Huang, Haotian and Wang, Yifei and Wang, Yisen",
)

PLAIN = Method("plain training", "", None, None)
TRAININGS = {
    "none": PLAIN,
    "state_passing": Method(
        "state passing",
        "In state passing, training texts start from the final states of other texts instead of from nothing, so that "
        "the model also learns from the states that long texts lead to",
        "state-passing",
        UNEXPLORED_STATES,
    ),
    "random_noise": Method(
        "random noise states", "Training texts start from random states", "noise-states", UNEXPLORED_STATES
    ),
    "fitted_noise": Method(
        "fitted noise states",
        "Training texts start from random states with the mean and variance of final states",
        "noise-states",
        UNEXPLORED_STATES,
    ),
    "tbtt": Method(
        "truncated backpropagation through time",
        "Long texts are trained on in chunks, and each chunk starts from the final state of the one before",
        "tbtt",
        UNEXPLORED_STATES,
    ),
    "mixed": Method(
        "mixed initial states",
        "Each training text starts from a state drawn from several sources (zero, noise, other texts, the same text)",
        None,
        UNEXPLORED_STATES,
    ),
    "learned": Method("a learned initial state", "All texts start from one state that is trained, too", None, None),
    "statex": Method(
        "state expansion and training", "Some layers got larger states, and the model was trained on", "statex", STATEX
    ),
}
OUTPUT_ALIGNMENT = Method(
    "output alignment",
    "The output alignment loss asks for like predictions after long and short contexts",
    "output-alignment",
    ALIGNMENT,
)
EXPANSION = Method("state expansion", "Some layers got larger states", "statex", STATEX)
FORGETTING = Method(
    "forgetting at inference", "The states are made to forget more than they learned to", None, STUFFED_MAMBA
)
MIMETIC_START = Method(
    "mimetic initialization", "Its first weights were close to linear attention", "mimetic-initialization", MIMETIC
)
CONVERSION = Method("conversion", "", None, None)


def methods_of(step: Step) -> list[Method]:
    """What a step used, the main one first."""
    if step.kind == "expand":
        return [EXPANSION]
    if step.kind == "forget":
        return [FORGETTING]
    if step.kind in ("convert", "merge"):
        return [CONVERSION]
    if step.training is None:
        return [PLAIN]
    name = re.split(r" with |output alignment", step.training.method)[0]
    found = [TRAININGS.get(name, Method(name, "", None, None))] if name else [PLAIN]
    if "output alignment" in step.training.method:
        found.append(OUTPUT_ALIGNMENT)
    if "mimetic" in step.training.settings.get("initial weights", ""):
        found.append(MIMETIC_START)
    return found


def methods_in(lineage: Lineage | None) -> list[Method]:
    """All that a lineage used, each once, in its order."""
    steps: Iterable[Step] = () if lineage is None else lineage.steps
    return list(dict.fromkeys(method for step in steps for method in methods_of(step)))
