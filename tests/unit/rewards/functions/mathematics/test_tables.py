"""Golden cases of the mathematics, in two tables: verdicts on pairs of answers, and what is read of a text."""

from pathlib import Path

import pytest

from trl_drgrpo.rewards.functions.mathematics import MathReward, unreadable_gold
from trl_drgrpo.rewards.functions.mathematics.answers import (
    boxed_answer,
    extract_answer,
    final_line_answer,
    read,
    tagged_answer,
    unlabeled,
)
from trl_drgrpo.rewards.functions.mathematics.equivalence import equivalent
from trl_drgrpo.rewards.functions.mathematics.guards import is_cheap, is_well_formed
from trl_drgrpo.rewards.functions.mathematics.latex import tidy
from trl_drgrpo.rewards.functions.mathematics.quantities import exact_number
from trl_drgrpo.rewards.functions.mathematics.units import split_unit, units_agree

DATA = Path(__file__).parents[4] / "data"
HERE = MathReward(limits=None)


def lines(name):
    """Section and line of every case of a table."""
    section = ""
    for line in (DATA / name).read_text("utf-8").split("\n"):
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line and not line.startswith("# "):
            yield section, line


@pytest.mark.parametrize(("section", "pair"), lines("math_pairs.tsv"))
def test_the_verdict_on_a_pair(section, pair):
    verdict, gold, answer = pair.split("\t")
    assert equivalent(gold, answer) is (verdict == "same")
    assert equivalent(gold, answer, deep=False) in (verdict == "same", None)
    if verdict == "different":
        assert equivalent(answer, gold) is False


def found_at(place, finder, text):
    assert extract_answer(text, place) == finder(text)
    return finder(text)


def variable_and_value(text):
    answer = read(tidy(text))
    return answer.variable, answer.text


READERS = {
    "boxed": lambda text: found_at("boxed", boxed_answer, text),
    "tags": lambda text: found_at("tags", tagged_answer, text),
    "final line": lambda text: found_at("final_line", final_line_answer, text),
    "variable and value": variable_and_value,
    "without label": lambda text: unlabeled(tidy(text)),
    "unreadable gold": unreadable_gold,
    "tidy": tidy,
    "cheap": lambda text: is_cheap(tidy(text)),
    "well formed": is_well_formed,
    "number": lambda text: (number := exact_number(text)) and number.value,
    "number and unit": lambda text: split_unit(tidy(text)),
}
SHOWN = {"None": "∅", "True": "yes", "False": "no"}


@pytest.mark.parametrize(
    ("section", "line"), [case for case in lines("math_reading.tsv") if case[0] not in ("reward", "units agree")]
)
def test_what_is_read_of_a_text(section, line):
    text, *due = line.replace("⏎", "\n").split("\t")
    found = READERS[section](text)
    found = found if isinstance(found, tuple) else (found,)
    assert [SHOWN.get(str(each), str(each)) for each in found] == due


@pytest.mark.parametrize("line", [line for section, line in lines("math_reading.tsv") if section == "units agree"])
def test_two_units_contradict_each_other_and_one_does_not(line):
    one, other, due = line.split("\t")
    assert SHOWN[str(units_agree(one, other))] == SHOWN[str(units_agree(other, one))] == due


@pytest.mark.parametrize("line", [line for section, line in lines("math_reading.tsv") if section == "reward"])
def test_the_reward_of_a_completion(line):
    text, due, *golds = line.replace("⏎", "\n").split("\t")
    golds = [None if gold == "∅" else gold for gold in golds]
    for completion in (text, [{"role": "assistant", "content": text}]):
        [reward] = HERE(completions=[completion], solution=[golds if len(golds) > 1 else golds[0]])
        assert reward == (None if due == "∅" else float(due))
