"""`--one-of N` leaves no test out."""

from tests.conftest import one_of


def test_each_test_keeps_a_share_of_its_cases() -> None:
    cases = ["a.py::one", *(f"a.py::ten[{n}]" for n in range(10)), *(f"b.py::T::two[{n}-x[y]]" for n in range(2))]
    assert one_of(1, cases) == {*cases}
    for number, kept in ((2, (1, 5, 1)), (3, (1, 4, 1)), (100, (1, 1, 1))):
        chosen = one_of(number, cases)
        assert (
            tuple(sum(case.startswith(name) for case in chosen) for name in ("a.py::one", "a.py::t", "b.py")) == kept
        )
        assert chosen <= {*cases}
        assert chosen == one_of(number, reversed(cases))
