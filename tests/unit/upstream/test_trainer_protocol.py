"""Features ask the trainer for what `TrainerProtocol` lists: nothing beyond, and all of it."""

import ast
import re
from pathlib import Path

import trl_drgrpo
from trl_drgrpo import TrainerProtocol

ROOT = Path(trl_drgrpo.__file__).parent
# Beside the room of features: those that live elsewhere, and what is handed the trainer in their place.
ELSEWHERE = ("upstream/environments.py", "upstream/description.py", "process_rewards/step_scorer.py")
MEMBERS = {name for name in (*vars(TrainerProtocol), *TrainerProtocol.__annotations__) if not name.startswith("_")}


def is_trainer(node):
    """Tell whether an expression is the trainer: `trainer`, `self.trainer`."""
    return (isinstance(node, ast.Name) and node.id == "trainer") or (
        isinstance(node, ast.Attribute) and node.attr == "trainer"
    )


def reached_for(source):
    """Attributes of the trainer that code names, and the first argument's of `getattr` and the like."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and is_trainer(node.value):
            yield node.attr
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr", "vars"):
            assert not (node.args and is_trainer(node.args[0])), ast.unparse(node)


def used():
    """Attributes of the trainer, by the files that name them."""
    names = {}
    sources = [*(ROOT / "features").rglob("*.py"), *(ROOT / path for path in ELSEWHERE)]
    for path in sources:
        if path.name == "progress.py":  # shows the progress of any trainer of transformers
            continue
        for name in reached_for(path.read_text(encoding="utf-8")):
            names.setdefault(name, path.name)
    for path in (ROOT / "features").rglob("*.jinja"):
        for name in re.findall(r"\btrainer\.(\w+)", path.read_text(encoding="utf-8")):
            names.setdefault(name, path.name)
    return names


def test_features_reach_for_nothing_else():
    assert {name: place for name, place in used().items() if name not in MEMBERS} == {}


def test_the_protocol_lists_no_member_that_features_do_not_use():
    assert sorted(MEMBERS - set(used())) == []


def test_the_trainer_has_it(build):
    trainer = build()
    assert [name for name in MEMBERS if not hasattr(trainer, name)] == []


def test_a_reach_beyond_is_seen():
    source = "def f(self):\n    trainer = self.trainer\n    return trainer.ours, self.trainer.theirs"
    assert sorted(set(reached_for(source))) == ["ours", "theirs"]
