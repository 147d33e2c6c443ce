"""The papers that code, cards, recipes and guides cite, each under one title.

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
        """Its BibTeX entry."""
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
    "2604.01168",
    "Young, Jack",
    2026,
    "{S0} Tuning: Zero-Overhead Adaptation of Hybrid Recurrent-Attention Models",
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

PAPERS = {
    paper.arxiv: paper
    for paper in (
        UNEXPLORED_STATES,
        LEARNED_STATE,
        MIMETIC,
        ALIGNMENT,
        STUFFED_MAMBA,
        STATEX,
        Paper("1502.05698", "Weston, Jason and others", 2015, "Towards {AI}-Complete Question Answering"),
        Paper("1604.06174", "Chen, Tianqi and others", 2016, "Training Deep Nets with Sublinear Memory Cost"),
        Paper("2006.16236", "Katharopoulos, Angelos and others", 2020, "Transformers are {RNNs}"),
        Paper(
            "2102.11174", "Schlag, Imanol and others", 2021, "Linear Transformers Are Secretly Fast Weight Programmers"
        ),
        Paper("2103.13076", "Kasai, Jungo and others", 2021, "Finetuning Pretrained Transformers into {RNNs}"),
        Paper("2104.09864", "Su, Jianlin and others", 2021, "{RoFormer}"),
        Paper("2108.12409", "Press, Ofir and others", 2021, "Train Short, Test Long ({ALiBi})"),
        Paper("2305.16300", "Mohtashami, Amirkeivan and Jaggi, Martin", 2023, "Landmark Attention"),
        Paper("2312.00752", "Gu, Albert and Dao, Tri", 2023, "Mamba"),
        Paper("2312.06635", "Yang, Songlin and others", 2023, "Gated Linear Attention Transformers"),
        Paper("2402.01032", "Jelassi, Samy and others", 2024, "Repeat After Me"),
        Paper("2402.04347", "Zhang, Michael and others", 2024, "The Hedgehog and the Porcupine"),
        Paper("2404.05892", "Peng, Bo and others", 2024, "Eagle and Finch ({RWKV-5} and {RWKV-6})"),
        Paper("2404.06654", "Hsieh, Cheng-Ping and others", 2024, "{RULER}"),
        Paper("2404.07904", "Qin, Zhen and others", 2024, "{HGRN2}: Gated Linear {RNNs} with State Expansion"),
        Paper("2405.21060", "Dao, Tri and Gu, Albert", 2024, "Transformers are {SSMs} ({Mamba-2})"),
        Paper("2406.06484", "Yang, Songlin and others", 2024, "Parallelizing Linear Transformers with the Delta Rule"),
        Paper("2406.10149", "Kuratov, Yuri and others", 2024, "{BABILong}"),
        Paper("2407.05483", "Arora, Simran and others", 2024, "Just Read Twice"),
        Paper("2410.05355", "Zuo, Jingwei and others", 2024, "Falcon Mamba"),
        Paper("2411.12537", "Grazzi, Riccardo and others", 2024, "State-Tracking Through Negative Eigenvalues"),
        Paper("2412.06464", "Yang, Songlin and Kautz, Jan and Hatamizadeh, Ali", 2024, "Gated Delta Networks"),
        Paper("2502.13685", "Du, Jusen and others", 2025, "{MoM}: Linear Sequence Modeling with Mixture-of-Memories"),
        Paper("2503.14456", "Peng, Bo and others", 2025, '{RWKV-7} "Goose" with Expressive Dynamic State Evolution'),
        Paper("2510.26692", "{Kimi Team} and others", 2025, "Kimi Linear"),
        Paper("2603.15569", "Lahoti, Aakash and others", 2026, "Mamba-3"),
        Paper("2604.01168", "Young, Jack", 2026, "{S0} Tuning"),
    )
}
"""All papers by their numbers on arXiv."""
