"""Metrics that were renamed: logged under both names, read under either, shown once."""

import pytest

from trl_drgrpo.features.diagnostics.renamed import OLD_NAMES, with_new_names, with_old_names
from trl_drgrpo.features.diagnostics.statistics import BatchRows, batch_statistics


@pytest.fixture(scope="module")
def logged():
    """Two groups of two with everything that can be said of a batch: one solved in half, one not at all."""
    rewards, lengths = [1.0, 0.0, 0.0, 0.0], [2, 3, 4, 5]
    correct, cut = [True, False, False, False], [False, True, False, True]
    return batch_statistics(BatchRows(2, rewards, lengths, lengths, [1.0, 1.5, 0.0, 0.0], cut, [1, 2, 3, 4], correct))


def test_the_new_names_are_logged_and_no_old_one(logged):
    assert logged.keys() >= OLD_NAMES.keys()
    assert not logged.keys() & set(OLD_NAMES.values())


def test_both_names_have_the_same_value(logged):
    both = with_old_names(logged)
    assert both.keys() == logged.keys() | set(OLD_NAMES.values())
    assert all(both[new] == both[old] == logged[new] for new, old in OLD_NAMES.items())


def test_an_older_log_and_a_doubled_one_read_alike(logged):
    both = with_old_names(logged)
    assert with_new_names(both) == logged
    assert with_new_names(dict(reversed(both.items()))) == logged
    assert with_new_names({name: value for name, value in both.items() if name not in OLD_NAMES}) == logged


def test_the_new_name_counts_where_both_are_there():
    new, old = next(iter(OLD_NAMES.items()))
    assert with_new_names({old: 0.0, new: 1.0}) == with_new_names({new: 1.0, old: 0.0}) == {new: 1.0}


def test_those_of_an_evaluation():
    new, old = next(iter(OLD_NAMES.items()))
    assert with_new_names({f"eval_{old}": 0.5, "eval_reward": 1.0}) == {f"eval_{new}": 0.5, "eval_reward": 1.0}
