"""The package as others get it: light to import and of the versions it names; `test_distribution.py` has the wheel."""

import ast
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import HEAVY, loaded_after
from transformers import BitsAndBytesConfig

import trl_drgrpo
from trl_drgrpo.common.errors import require_for_quantization, require_package

ROOT = Path(trl_drgrpo.__file__).parent.parent
ROOM_NAMES = ("isolation", "functions.judge", "functions.mathematics")


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **options)


PURE = ("objective.advantages", "objective.loss", "common.errors", "upstream.versions")
IMPORTS = [
    ("import trl_drgrpo; from trl_drgrpo.rewards import *", HEAVY),
    ("import " + ", ".join(f"trl_drgrpo.rewards.{room}" for room in ROOM_NAMES), HEAVY),
    ("import trl_drgrpo.single_gpu.lora_presets, trl_drgrpo.cli.short_commands, trl_drgrpo.cli.job", HEAVY),
    ("import trl_drgrpo.process_rewards.steps", ("torch", "trl", "transformers", "accelerate")),
    ("import " + ", ".join(f"trl_drgrpo.{module}" for module in PURE), ("trl", "transformers", "accelerate")),
]


@pytest.mark.parametrize(("code", "heavy"), IMPORTS)
def test_importing_loads_nothing_heavy(code, heavy):
    assert loaded_after(code, heavy) == []


def test_the_rewards_offer_what_their_rooms_offer_and_the_recipes_name():
    from trl_drgrpo import rewards
    from trl_drgrpo.rewards.recipe_rewards import REWARDS

    for name in rewards.__all__:
        homes = [importlib.import_module(f"trl_drgrpo.rewards.{room}") for room in ROOM_NAMES]
        for home in homes:
            if name in home.__all__:
                assert getattr(home, name) is getattr(rewards, name), name
    # A public name that makes or is a reward can be named in a recipe, whatever it is called there.
    homes = {id(home) for entry in REWARDS.values() for home in (entry.reward, entry.factory)}
    registered = {name for name in rewards.__all__ if id(getattr(rewards, name, None)) in homes}
    others = {
        "Limits",
        "RewardFunction",
        "Sandbox",
        "SampleReward",
        "check_columns",
        "checked_reward",
        "completion_text",
        "prompt_text",
        "register_reward",
        "resolve_reward",
    }
    assert {name for name in rewards.__all__ if not name.startswith("to_")} - others <= registered


def test_the_package_runs_as_a_module():
    assert run(sys.executable, "-m", "trl_drgrpo", "--version").stdout.startswith("trl-drgrpo ")


def test_every_module_says_what_it_is_for():
    for info in pkgutil.walk_packages(trl_drgrpo.__path__, "trl_drgrpo."):
        source = Path(importlib.util.find_spec(info.name).origin).read_text()
        assert not source.strip() or source.lstrip().startswith(('"""', 'r"""')), info.name


def test_the_doctests_are_found():
    for name in ("advantages", "loss"):
        module = importlib.import_module(f"trl_drgrpo.objective.{name}")
        assert sum(len(test.examples) for test in doctest.DocTestFinder().find(module)) >= 3


def test_no_private_name_of_trl_is_used_outside_upstream():
    private = re.compile(
        r"(self|trainer|super\(\))\._(step|buffered_inputs|metrics|logs|generate|calculate|compute|prepare|get_per_token)"
    )
    for path in (ROOT / "trl_drgrpo").rglob("*.py"):
        if path.parent.name != "upstream":
            assert not private.search(path.read_text()), path


def test_the_changelog_knows_the_version_and_the_tested_stack():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[(Unreleased|\d+\.\d+\.\d+)\]", changelog, re.MULTILINE)
    for package in ("trl", "transformers", "torch", "peft"):
        pinned = re.search(rf"^{package}==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
        assert pinned
        assert f"{package} {pinned.group(1)}" in changelog


def test_the_oldest_stack_is_what_pyproject_allows_and_else_the_tested_one():
    def pins(name):
        lines = (ROOT / name).read_text().splitlines()
        return dict(line.split("==") for line in lines if line and not line.startswith("#"))

    ours, oldest = pins("constraints.txt"), pins("constraints-oldest.txt")
    assert oldest.keys() == ours.keys()
    for_vllm = {"huggingface_hub", "numpy"}
    assert {name for name in ours if ours[name] != oldest[name]} == {"transformers", "peft", *for_vllm}
    allowed = re.findall(r'^    "(\w+)>=([\d.]+)', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    floors = dict(allowed[: [name for name, _ in allowed].index("pyyaml")])
    assert floors.keys() == {"trl", "transformers", "torch", "accelerate", "datasets", "peft"}
    for name in floors.keys() - {"torch"}:  # the newest torch serves all of them, and is large
        assert oldest[name].removesuffix(".0") == floors[name].removesuffix(".0"), name


# Lazy packages: an import under `TYPE_CHECKING` is the whole declaration of a public name


PACKAGES = sorted((ROOT / "trl_drgrpo").rglob("__init__.py"))
LAZY = [path for path in PACKAGES if "\nattach(__name__)\n" in path.read_text()]


@pytest.mark.parametrize("path", LAZY, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_names_that_a_type_checker_sees_are_public(path):
    package = importlib.import_module(".".join(path.parent.relative_to(ROOT).parts))
    block = next(node for node in ast.parse(path.read_text()).body if isinstance(node, ast.If))
    imported = [(node.module, alias) for node in block.body for alias in node.names]
    assert package.__all__ == sorted(alias.asname for _, alias in imported)
    assert [n for n in dir(package) if n[:2] != "__"] == [n for n in package.__all__ if n[:2] != "__"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing


def test_a_name_is_the_one_of_its_module():
    from trl_drgrpo.rewards import contract

    assert len(LAZY) >= 8
    assert importlib.import_module("trl_drgrpo.rewards.isolation").Limits is contract.Limits


# The wording of every literal `InputError` and `RewardError`; what is installed is no error


OLD_WORDS = re.compile(r"\b(mend|anew|roll-outs?|goes in|goes away)\b", re.IGNORECASE)


def literal(node: ast.expr) -> str | None:
    """A text as it stands in the code, with `{}` for its values; `None` for an expression."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def problems(source: str) -> list[str]:
    """Texts out of form: `got` and `expected` without a full stop, the remedy a sentence, all in today's words."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and len(node.args) == 4]
    found = []
    for call in calls:
        if getattr(call.func, "id", "") in ("InputError", "RewardError"):
            _, got, expected, remedy = map(literal, call.args)
            found += [text for text in (got, expected) if text and text.endswith(".")]
            found += [remedy] if remedy and not remedy.endswith((".", "?", "{}")) else []
            found += [text for text in (got, expected, remedy) if text and OLD_WORDS.search(text)]
    return found


def test_every_error_has_its_form():
    files = sorted(Path(trl_drgrpo.__file__).parent.rglob("*.py"))
    assert {str(file): out for file in files if (out := problems(file.read_text(encoding="utf-8")))} == {}


def test_an_installed_package_is_no_error():
    require_package("torch", "anything", "True", "none")
    require_for_quantization(None)
    require_for_quantization({"quant_method": "gptq", "bits": 4})
    require_for_quantization(BitsAndBytesConfig())


def test_commands_know_all_names_without_the_packages_of_any_extra():
    """`train` lists the names of all rewards, so none of them may need its package when it is imported."""
    extras = ("bitsandbytes", "jsonschema", "math_verify", "matplotlib", "reasoning_gym", "sympy", "vllm")
    script = f"""
import sys
sys.modules.update(dict.fromkeys({extras}))  # as if they were not installed
from trl_drgrpo.cli.main import parse
parse(["train", "--output_dir", "out"])
from trl_drgrpo.rewards import math_reward
assert math_reward(completions=[r"\\boxed{{2}}"], solution=["2"]) == [1.0]
"""
    done = run(sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
