"""The numbers of the first screen: raw, with their steps."""

from trl_drgrpo.report.curves import Curve, headline
from trl_drgrpo.report.records import Run, Warned


def by_name(run, **curves):
    return {number["name"]: number for number in headline(run, curves)}


def test_first_and_last_are_as_logged():
    rates = Curve(list(range(1, 21)), [0.2] * 18 + [0.5, 0.848])
    run = Run("r", "r", "trl-drgrpo", warnings=[Warned(3, "kl", "high")])
    dead = Curve([1, 20], [0.0, 0.625])
    speed = Curve([1, 2, 4], [100.0, None, 300.0])
    spent = {"time/generate_s": Curve([1, 2, 4], [2.0, 5.0, 0.5]), "time/train_s": Curve([1, 2, 4], [2.0, 5.0, 0.5])}
    metrics = {"drgrpo/pass_rate": rates, "drgrpo/zero_signal_frac": dead, "time/tokens_per_s": speed}
    numbers = by_name(run, **metrics, **spent)
    rate = numbers["Pass rate"]
    assert (rate["first"], rate["last"], rate["steps"]) == (0.2, 0.848, [1, 20])
    assert rate["last_tenth"] == 0.674  # (0.5 + 0.848) / 2
    assert (numbers["Live groups"]["first"], numbers["Live groups"]["last"]) == (1.0, 0.375)
    # 400 tokens in 4 s; 300 in each second of steps 3 and 4, which were logged as 1 s each
    assert (numbers["Speed"]["last"], numbers["Speed"]["steps"]) == (166.67, [1, 4])
    assert numbers["Warnings"]["last"] == 1
    assert numbers["Mean length"]["last"] is None
    assert len(numbers) == 5


def test_a_run_without_anything():
    numbers = by_name(Run("r", "r", "trl"))
    assert [number["last"] for number in numbers.values()] == [None] * 5
    assert list(numbers) == ["Reward", "Mean length", "Live groups", "Speed", "Warnings"]
