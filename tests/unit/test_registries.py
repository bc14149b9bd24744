"""The registries: each entry of this package is complete, and users add their own from a file or a package."""

import inspect
import re
import sys
from pathlib import Path

import pytest
from registries import REGISTRIES, restored
from tiny_prms import made

from trl_drgrpo import register_prm_format, register_reward, register_warning
from trl_drgrpo.common import registry
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.features.diagnostics.run_warnings import CAUSES, RunWarnings, warning_thresholds
from trl_drgrpo.process_rewards import MathShepherdScorer
from trl_drgrpo.process_rewards.named import FORMATS, step_reward
from trl_drgrpo.rewards import resolve_reward
from trl_drgrpo.rewards.recipe_names import REWARDS
from trl_drgrpo.rewards.recipe_rewards import check_spec, needs_trust

GUIDES = Path(__file__).parents[2] / "recipes" / "guides"
GUIDE_OF = {"outcome": "rewards.md", "wrapper": "rewards.md", "adapter": "rewards.md"}


@pytest.fixture(autouse=True)
def clean():
    with restored():
        yield


def guide(name):
    return (GUIDES / name).read_text(encoding="utf-8")


def half(completions, **kwargs):
    return [0.5 for _ in completions]


@pytest.mark.parametrize("name", REWARDS)
def test_every_reward_loads_and_is_in_its_guide(name):
    entry = REWARDS[name]
    if entry.reward is not None:
        assert callable(REWARDS.load(name, entry.reward))
    if entry.factory is not None:
        assert inspect.signature(REWARDS.load(name, entry.factory)).parameters
    assert entry.help.endswith(".")
    assert f"`{name}`" in guide(GUIDE_OF.get(entry.role, "process_reward_models.md"))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_loads_and_is_a_reward_of_the_same_name(name):
    prm_format = FORMATS[name]
    scorer = FORMATS.load(name, prm_format.scorer)
    assert all(re.search(rf"\b{setting}\b", inspect.getdoc(scorer)) for setting in scorer.settings)
    assert REWARDS[name].help == prm_format.help
    assert (prm_format.published_ids is None) != (prm_format.architecture is None)


@pytest.mark.parametrize("name", CAUSES)
def test_every_cause_is_in_its_guide(name):
    cause = CAUSES[name]
    assert cause.help
    assert f"| `{cause.setting}`" in guide("monitoring.md")
    reported = {other.setting for other in CAUSES.values()}
    assert set(cause.explains) <= reported


def register_half(name="half", reward=half, **options):
    register_reward(name, reward, **{"help": "Half.", **options})


def register_format(name="half", scorer=MathShepherdScorer, **options):
    register_prm_format(name, scorer, **{"help": "Half.", "is_causal": True, **options})


def without_help(window, values):
    return None


def with_help(window, values):
    """Values are high."""


@pytest.mark.parametrize(
    ("register", "message"),
    [
        (lambda: register_half("math_reward"), "reward 'math_reward': got a name that trl_drgrpo.* has registered"),
        (
            lambda: register_half("prm"),
            "reward 'prm': got a name that trl_drgrpo.* has registered",
        ),
        (lambda: register_half("mine.half"), "reward 'mine.half': got this name; expected letters"),
        (lambda: register_half(help=" "), "got no help"),
        (lambda: register_half(reward=None), "got neither reward nor factory"),
        (lambda: register_half(reward="mine.half"), "got 'mine.half'; expected a callable, or 'module:attribute'"),
        (lambda: register_half(reward=dict), "got reward=dict, which is a class"),
        (lambda: register_format("versa_prm"), "reward 'versa_prm': got a name that .* has registered"),
        (lambda: register_format("math_reward"), "reward 'math_reward': got a name"),
        (lambda: register_format(scorer=half), "expected a class of PRMScorer"),
        (lambda: register_format(published_ids="("), "expected a regular expression"),
        (lambda: register_warning("kl")(half), "warning 'half': got a function that does not take a window"),
        (lambda: register_warning("kl")(without_help), "warning 'without_help': got no help"),
        *[
            (lambda name=name: register_half(name), "got this name; expected letters")
            for name in (3, None, "", "1", "-half", "a b", "a\nb", "null", "On", "TRUE")
        ],
        (lambda: register_half(help=3), "got no help"),
        (lambda: register_half(factory=half, is_harmless="no"), "reward 'half': got is_harmless='no'; expected True"),
        (lambda: register_format(is_causal="x"), "got is_causal='x'; expected True or False"),
        (lambda: register_warning("kl", from_logs="no")(with_help), "got from_logs='no'; expected True or False"),
        (lambda: register_warning("kl", steps="a")(with_help), "got steps='a'; expected a positive integer"),
        (lambda: register_warning("kl", steps=0)(with_help), "got steps=0; expected a positive integer"),
        (lambda: register_warning("kl", times=None)(with_help), "got times=None; expected a positive integer"),
        (lambda: register_half(role="judge"), "got role='judge'; expected one of outcome"),
        (
            lambda: register_half(usual_options={"scale": 1}),
            "got usual_options={'scale': 1}; expected a mapping, beside",
        ),
        (lambda: register_half(factory=half, usual_options=["scale"]), "expected a mapping, beside a factory"),
        (lambda: register_format(published_ids=3), "expected a regular expression"),
        (lambda: register_warning(with_help), "got the metrics .*with_help.*; expected texts"),
        (lambda: register_warning("kl", step=3)(with_help), "got an option that does not exist .*'step'"),
        (lambda: register_warning()(without_help), "warning 'without_help': got no metrics"),
    ],
)
def test_a_wrong_registration_is_refused(register, message):
    names = [list(registry) for registry in REGISTRIES]
    with pytest.raises(registry.RegistrationError, match=f"^registration of the .*{message}"):
        register()
    assert [list(registry) for registry in REGISTRIES] == names


def test_a_second_registration_is_refused():
    register_half()
    with pytest.raises(InputError, match="got a name that .*test_registries has registered already"):
        register_half()


@pytest.mark.parametrize("home", ["trl.rewards:gone_reward", "trl.gone:reward", "gone_package:reward"])
def test_a_reward_that_does_not_exist_is_no_mistake_of_the_user(home):
    register_reward("gone", home, help="Gone.")
    with pytest.raises(InputError, match=f"{home}, which does not exist .* Your settings are not the cause"):
        resolve_reward("gone")


def test_a_registered_number_is_no_reward():
    register_reward("pi", "math:pi", help="Pi.")
    with pytest.raises(InputError, match="reward 'pi': got math:pi, which is 3.14.*; expected a function or class"):
        resolve_reward("pi")


def test_options_of_a_users_reward_are_code_that_needs_trust():
    register_reward("scaled", factory=lambda scale: half, help="Scaled.")
    assert needs_trust({"scaled": {"scale": 1}})
    register_reward("safe", factory=lambda scale: half, help="Safe.", is_harmless=True)
    assert not needs_trust({"safe": {"scale": 1}})


PACKAGE = """
from trl_drgrpo import register_prm_format, register_reward, register_warning
from trl_drgrpo.process_rewards import MathShepherdScorer


class Scaled:
    __name__ = "scaled"

    def __init__(self, scale: float = 1.0):
        self.scale = scale

    def __call__(self, completions, **kwargs):
        return [self.scale * len(completion) for completion in completions]


class TabScorer(MathShepherdScorer):
    settings = {**MathShepherdScorer.settings, "number_steps": False}


register_reward("scaled_length", Scaled(), help="Length, scaled.", factory=Scaled)
register_prm_format("tab_prm", TabScorer, help="Steps without numbers.", is_causal=True, published_ids="tab-prm")


@register_warning("reward", steps=2)
def reward_is_high(window, rewards, *, level=10.0):
    \"\"\"The reward is higher than it can be.\"\"\"
    if min(rewards) < level:
        return None
    return f"The reward was above {level:g} over {window.span}. Look for a mistake in it."


@register_warning("reward")
def mistaken(window, rewards):
    \"\"\"Fails.\"\"\"
    return 1 / 0
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with an entry point that registers names; no import of it in the script."""
    (tmp_path / "their_names.py").write_text(PACKAGE)
    (tmp_path / "their_names-1.0.dist-info").mkdir()
    (tmp_path / "their_names-1.0.dist-info" / "METADATA").write_text("Name: their_names\nVersion: 1.0\n")
    (tmp_path / "their_names-1.0.dist-info" / "entry_points.txt").write_text("[trl_drgrpo]\nnames = their_names\n")
    monkeypatch.syspath_prepend(tmp_path)
    for names in REGISTRIES:
        monkeypatch.setattr(names, "_is_filled", False)
    yield
    sys.modules.pop("their_names", None)


def test_names_of_an_installed_package_work_in_recipes(package, saved_model):
    spec = {"scaled_length": {"scale": 2.0}}
    check_spec(spec)
    assert resolve_reward(spec)(completions=["ab"]) == [4.0]
    assert resolve_reward("scaled_length")(completions=["ab"]) == [2.0]
    scorer = step_reward({"tab_prm": {"model": saved_model}})
    assert (scorer.__name__, scorer.is_causal, scorer.number_steps) == ("tab_prm", True, False)


def test_a_users_format_scores(package, tmp_path):
    published = made("math_shepherd")
    for part in (published.model, published.tokenizer):
        part.save_pretrained(tmp_path / "tab-prm")
    scorer = step_reward({"prm": str(tmp_path / "tab-prm")})
    assert type(scorer).__name__ == "TabScorer"
    assert len(scorer(prompts=["1+1="], steps=[["2"]])[0]) == 1


def test_a_users_warning_is_watched_and_one_that_fails_is_not_missed(package, caplog):
    thresholds = warning_thresholds({"reward_is_high": {"level": 5}, "kl": False})
    assert thresholds["reward_is_high"] == {"level": 5, "steps": 2}
    told = []
    warnings = RunWarnings(thresholds, 8, lambda *warning: told.append(warning))
    for step in range(1, 5):
        warnings.observe(step, {"reward": 6.0, "completions/clipped_ratio": 0.9})
    assert told == [
        (2, "reward_is_high", "The reward was above 5 over the last 2 optimizer steps. Look for a mistake in it.")
    ]
    assert caplog.text.count("'mistaken' failed") == 1
    warnings.finish()


def test_a_package_that_fails_to_import_is_logged(package, tmp_path, caplog):
    (tmp_path / "their_names.py").write_text("import a_module_that_is_not_there\n")
    assert "math_reward" in REWARDS
    assert "Names of their_names are missing: ModuleNotFoundError" in caplog.text
