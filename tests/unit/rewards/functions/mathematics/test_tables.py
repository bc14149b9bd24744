"""Golden cases of the mathematics, in two tables: verdicts on pairs of answers, and what is read of a text."""

import pytest
from case_tables import cases

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
from trl_drgrpo.rewards.functions.mathematics.quantities import exact_number, letter_unit, split_unit, units_agree

HERE = MathReward(limits=None)


@pytest.mark.parametrize(("_", "verdict", "gold", "answer"), cases("math_pairs.tsv"))
def test_the_verdict_on_a_pair(_, verdict, gold, answer):
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
    "auto": extract_answer,
    "variable and value": variable_and_value,
    "without label": lambda text: unlabeled(tidy(text)),
    "unreadable gold": unreadable_gold,
    "letter unit": letter_unit,
    "tidy": tidy,
    "cheap": lambda text: is_cheap(tidy(text)),
    "well formed": is_well_formed,
    "number": lambda text: (number := exact_number(text)) and number.value,
    "number and unit": lambda text: split_unit(tidy(text)),
}
SHOWN = {"True": "yes", "False": "no"}


def shown(value):
    return None if value is None else SHOWN.get(str(value), str(value))


@pytest.mark.parametrize("case", cases("math_reading.tsv", *READERS), ids=str)
def test_every_reader_reads_its_rows_of_the_table(case):
    section, text, *due = case
    found = READERS[section](text)
    assert [*map(shown, found if isinstance(found, tuple) else (found,))] == due


@pytest.mark.parametrize(("_", "one", "other", "due"), cases("math_reading.tsv", "units agree"))
def test_two_units_contradict_each_other_and_one_does_not(_, one, other, due):
    assert shown(units_agree(one, other)) == shown(units_agree(other, one)) == due


@pytest.mark.parametrize("case", cases("math_reading.tsv", "reward"), ids=str)
def test_the_reward_of_a_completion(case):
    _, text, due, *golds = case
    for completion in (text, [{"role": "assistant", "content": text}]):
        rewards = HERE(completions=[completion], solution=[golds if len(golds) > 1 else golds[0]])
        assert rewards == [due and float(due)]
