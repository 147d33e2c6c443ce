"""The papers of the methods, each under one title.

Docstrings cite them as "arXiv:2507.02782, section 4.2". Two were read, and are cited by section, in versions before
the published ones: 2506.11769 as "Output Alignment: A Top-Down Approach to Length Generalization", and
2410.11135 as submitted for review.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """A paper on arXiv.

    Args:
        arxiv: Its number.
        authors: In the form of BibTeX: "Last, First and Last, First".
        year: Of its first version.
        title: In the form of BibTeX, where braces keep capitals.
        published: Where and when it was published after that.
    """

    arxiv: str
    authors: str
    year: int
    title: str
    published: tuple[str, int] | None = None

    @property
    def name(self) -> str:
        """The citation in texts: "Chen et al., 2024"."""
        last = [author.partition(",")[0] for author in self.authors.split(" and ")]
        several = "others" in last or len(last) > 2
        return f"{last[0]} et al., {self.year}" if several else f"{' and '.join(last)}, {self.year}"

    @property
    def address(self) -> str:
        return f"https://arxiv.org/abs/{self.arxiv}"

    @property
    def bibtex(self) -> str:
        letters = re.sub(r"[^a-z ]", "", f"{self.authors.partition(',')[0].replace(' ', '')} {self.title}".lower())
        name, word, *_ = letters.split()
        kind, where, year = "article", f"  journal = {{arXiv preprint arXiv:{self.arxiv}}},\n", self.year
        if self.published is not None:
            book, year = self.published
            kind, where = "inproceedings", f"  booktitle = {{{book}}},\n  note = {{arXiv:{self.arxiv}}},\n"
        return (
            f"@{kind}{{{name}{self.year}{word},\n"
            f"  title = {{{self.title}}},\n"
            f"  author = {{{self.authors}}},\n"
            f"{where}  year = {{{year}}}\n}}"
        )


UNEXPLORED_STATES = Paper(
    "2507.02782",
    "Buitrago Ruiz, Ricardo and Gu, Albert",
    2025,
    "Understanding and Improving Length Generalization in Recurrent Models",
)
LEARNED_STATE = Paper(
    "2604.01168", "Young, Jack", 2026, "{S0} Tuning: Zero-Overhead Adaptation of Hybrid Recurrent-Attention Models"
)
MIMETIC = Paper(
    "2410.11135",
    "Trockman, Asher and Harutyunyan, Hrayr and Kolter, J. Zico and Kumar, Sanjiv and Bhojanapalli, Srinadh",
    2024,
    "Mimetic Initialization Helps State Space Models Learn to Recall",
)
ALIGNMENT = Paper(
    "2506.11769",
    "Du, Tianqi and Huang, Haotian and Wang, Yifei and Wang, Yisen",
    2025,
    "Long-Short Alignment for Effective Long-Context Modeling in {LLMs}",
)
STUFFED_MAMBA = Paper(
    "2410.07145",
    "Chen, Yingfa and Zhang, Xinrong and Hu, Shengding and Han, Xu and Liu, Zhiyuan and Sun, Maosong",
    2024,
    "Stuffed Mamba: Oversized States Lead to the Inability to Forget",
)
STATEX = Paper(
    "2509.22630",
    "Shen, Xingyu and Chen, Yingfa and Thai, Zhen Leng and Han, Xu and Liu, Zhiyuan and Sun, Maosong",
    2025,
    "{StateX}: Enhancing {RNN} Recall via Post-training State Expansion",
    ("Findings of the Association for Computational Linguistics: ACL 2026", 2026),
)
SWAX = Paper(
    "2509.24552",
    "Cabannes, Loïc and Beck, Maximilian and Szilvasy, Gergely and others",
    2025,
    "Short window attention enables long-term memorization",
)
