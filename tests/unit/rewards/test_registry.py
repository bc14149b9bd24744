"""Names become reward functions, and reasoning-gym scores as its tasks do."""

import pytest

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.rewards.recipe_rewards import bare_names, resolve_reward


@pytest.mark.parametrize("name", bare_names())
def test_every_registered_name_is_a_function(name):
    assert callable(resolve_reward(name))


def test_soft_overlong_punishment_has_trls_values():
    punish = resolve_reward("get_soft_overlong_punishment")
    # free up to 1280 - 256 = 1024 tokens, then linear down to -1 at 1280
    assert punish(completion_ids=[[0] * 1024, [0] * 1152, [0] * 1281]) == [0.0, -0.5, -1.0]


@pytest.fixture
def modules(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards_for_test.py").write_text(
        "def score(completions, **kwargs):\n    return [1.0 for _ in completions]\n\n\nconstant = 3\n\n\n"
        "class Scorer:\n    def __call__(self, **kwargs): ...\n"
    )
    (tmp_path / "orm_for_test.py").write_text("class ORM: ...\n")
    (tmp_path / "broken_for_test.py").write_text("import a_module_that_is_not_there\n")
    (tmp_path / "failing_for_test.py").write_text("x = 1 / 0\n")
    (tmp_path / "unfinished_for_test.py").write_text("def f(:\n")
    return tmp_path


@pytest.mark.parametrize(
    "spec", ["my_rewards_for_test.score", "my_rewards_for_test.py:score", "{}/my_rewards_for_test.py:score"]
)
def test_paths(modules, spec):
    assert resolve_reward(spec.format(modules))(completions=["a"]) == [1.0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("acuracy_reward", r"Did you mean accuracy_reward"),
        ("reward", "expected one of accuracy_reward, "),
        ("my_rewards_for_test.py", "A file needs the function's name too: `my_rewards_for_test.py:my_reward`"),
        ("nowhere.py:score", "a file that does not exist"),
        ("no_such_module_at_all.f", "whose module 'no_such_module_at_all' does not exist"),
        ("my_rewards_for_test.scores", "expected a function of my_rewards_for_test. Did you mean score"),
        ("my_rewards_for_test.py:zzz", "Its functions: Scorer, score"),
        ("my_rewards_for_test.constant", "which is a int; expected a function"),
        ("my_rewards_for_test.Scorer", "which is a class; .*Create an instance"),
        ("orm_for_test.ORM", "which is a class; .* pass trl_drgrpo.rewards.from_swift"),
        ("broken_for_test.f", "failed with ModuleNotFoundError: No module named 'a_module_that_is_not_there'"),
        ("broken_for_test.py:f", "failed with ModuleNotFoundError: No module named 'a_module_that_is_not_there'"),
        ("failing_for_test.f", "failed with ZeroDivisionError: division by zero"),
        ("unfinished_for_test.py:f", "failed with SyntaxError"),
    ],
)
def test_names_that_do_not_resolve(modules, spec, message):
    with pytest.raises(InputError, match=f"reward_funcs: got .*{message}"):
        resolve_reward(spec)
