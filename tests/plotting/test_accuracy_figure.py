"""The figure of accuracy against length."""

from hf_recurrent_lengthgen.metrics.accuracy.figure import accuracy_figure


def test_solid_lines_are_symbols_and_dashed_ones_whole_answers() -> None:
    curves = {"one": {50: (1.0, 0.9), 100: (0.8, 0.2)}, "two": {100: (0.3, 0.0), 50: (0.5, 0.1)}}
    axes = accuracy_figure(curves, "symbols", 50).axes[0]
    lines = axes.get_lines()[:4]
    assert [list(line.get_ydata()) for line in lines] == [[1.0, 0.8], [0.9, 0.2], [0.5, 0.3], [0.1, 0.0]]
    assert all(list(line.get_xdata()) == [50, 100] for line in lines)
    assert [line.get_linestyle() for line in lines] == ["-", "--", "-", "--"]
    assert lines[0].get_color() == lines[1].get_color() != lines[2].get_color()
    assert list(axes.get_xticks()) == [50, 100]
    assert axes.get_xlabel() == "Length (symbols)"
    texts = [text.get_text() for text in axes.texts]
    assert {"one", "two", "trained on 50"} <= set(texts)


def test_a_known_training_length_is_optional_and_one_length_is_enough() -> None:
    axes = accuracy_figure({"one": {50: (1.0, 0.9)}}, "pairs").axes[0]
    assert not any("trained on" in text.get_text() for text in axes.texts)
