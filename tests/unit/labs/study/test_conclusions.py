"""What the studies say of themselves: from the numbers alone."""

from trl_drgrpo.labs.study.conclusions import compared, length_bias, paired
from trl_drgrpo.labs.study.intervals import Interval


def test_an_interval_that_touches_the_value_is_not_told_apart_from_it():
    text = compared("Ratio", {"a": Interval(1.5, 0.5), "b": Interval(1.51, 0.5), "c": Interval(0.2, 0.1)}, even=1.0)
    assert (
        text
        == "Ratio: above 1 with b (1.5 ± 0.5); below 1 with c (0.2 ± 0.1); not told apart from 1 with a (1.5 ± 0.5)."
    )


def test_seeds_are_paired():
    assert paired([11.0, 31.0, 21.0], [10.0, 30.0, 20.0]) == Interval(1.0, 0.0)


def test_shorter_incorrect_answers_are_no_length_bias():
    found = {"grpo": Interval(-5.0, 1.0), "dapo": Interval(2.0, 1.0)}
    assert length_bias(found).endswith("The length bias shows under dapo (TRL's default).")
    assert length_bias({"grpo": found["grpo"]}).endswith("The length bias does not show.")


def test_many_comparisons_are_said_to_be_many():
    found = {str(number): Interval(0.0, 1.0) for number in range(8)}
    assert compared("Points", found).endswith("Of 8 comparisons one in twenty would say so by chance.")
    assert "chance" not in compared("Points", dict(list(found.items())[:7]))
