"""Where TRL is overridden, the range of it that is supported, and the provenance of numbers."""

import ast
import functools
import inspect
import re
import subprocess

import pytest
from trl import GRPOTrainer

import trl_drgrpo.trainer
import trl_drgrpo.upstream.trl_overrides
from trl_drgrpo import DrGRPOTrainer
from trl_drgrpo.common.errors import UpstreamError
from trl_drgrpo.upstream import versions as module
from trl_drgrpo.upstream.seams import SEAMS, check_upstream, patched_by, require_seams
from trl_drgrpo.upstream.trl_overrides import HostTrainer
from trl_drgrpo.upstream.versions import TRL_SUPPORTED, provenance, require_supported_trl

MODULES = [
    trl_drgrpo.upstream.trl_overrides,
    trl_drgrpo.trainer,
]


def test_every_seam_is_where_it_was():
    assert check_upstream() == dict.fromkeys(SEAMS, "")


def test_every_overridden_private_method_is_in_the_table():
    overridden = {name for name in vars(HostTrainer) if hasattr(GRPOTrainer, name) and not name.startswith("__")}
    private = {name for name in overridden if name.startswith("_") and not name.startswith("_abc")}
    assert private <= set(SEAMS)


def renamed(self, model, inputs_of_a_batch):
    return self.max_completion_length


def elsewhere(self, model, inputs):
    return self.args.max_completion_length


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (None, "GRPOTrainer._compute_loss is gone"),
        (renamed, "takes (model, inputs_of_a_batch); expected (model, inputs)"),
        (elsewhere, "no longer contains 'size(0) * self.max_completion_length'"),
    ],
)
def test_a_moved_seam_is_named(method, said):
    moved = type("Moved", (GRPOTrainer,), {"_compute_loss": method})
    assert said in check_upstream(moved)["_compute_loss"]


def test_a_moved_seam_stops_the_trainer_before_a_model_loads(monkeypatch):
    name = list(SEAMS)[1]
    monkeypatch.setattr(GRPOTrainer, name, None)
    with pytest.raises(UpstreamError, match=f"{name}: GRPOTrainer.{name} is gone"):
        DrGRPOTrainer(model="a/model-that-does-not-exist", reward_funcs=[len])
    with pytest.raises(UpstreamError, match="tested with trl"):
        require_seams()


def test_the_patch_of_another_package_is_named_with_its_module(monkeypatch):
    patch = {}  # made by a program, as some packages do: it has no source to read
    exec("def faster(self, model, inputs): return 0\nfaster.__module__ = 'faster_grpo.patches'", patch)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", patch["faster"])
    with pytest.raises(UpstreamError) as error:
        require_seams()
    assert "_compute_loss: replaced by the module faster_grpo.patches; it no longer contains" in str(error.value)
    assert "patches TRL (faster_grpo.patches)" in str(error.value)
    assert "install that one" not in str(error.value)


def test_a_patch_that_takes_over_the_originals_name_is_seen():
    @functools.wraps(GRPOTrainer._compute_loss)
    def wrapped(self, model, inputs):
        return 0

    patched = type("Patched", (GRPOTrainer,), {"_compute_loss": wrapped})
    assert patched_by("_compute_loss", patched) == __name__
    assert set(map(patched_by, SEAMS)) == {""}


def test_the_constructor_is_the_parents_with_ours_behind():
    ours = list(inspect.signature(DrGRPOTrainer.__init__).parameters.values())
    parents = list(inspect.signature(GRPOTrainer.__init__).parameters.values())
    assert [(p.name, p.default, p.kind) for p in ours[: len(parents)]] == [
        (p.name, p.default, p.kind) for p in parents
    ]
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in ours[len(parents) :])


def _methods(module):
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ClassDef) and issubclass(getattr(module, node.name), GRPOTrainer):
            yield from (item for item in node.body if isinstance(item, ast.FunctionDef))


def _super_calls(method):
    calls = [n for n in ast.walk(method) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    supers = [
        c for c in calls if isinstance(c.func.value, ast.Call) and getattr(c.func.value.func, "id", "") == "super"
    ]
    return [c.func.attr for c in supers]


@pytest.mark.parametrize("module", MODULES)
def test_each_override_calls_super_exactly_once(module):
    overrides = sorted(m.name for m in _methods(module) if hasattr(GRPOTrainer, m.name))
    assert overrides
    # in the override itself, or in the method that stands for TRL's own behavior
    calls = [name for m in _methods(module) for name in _super_calls(m) if hasattr(GRPOTrainer, name)]
    assert sorted(calls) == overrides


@pytest.mark.parametrize("module", MODULES)
def test_no_override_copies_lines_of_its_parent(module):
    for method in _methods(module):
        parent = getattr(GRPOTrainer, method.name, None)
        if parent is None or method.name == "__init__":
            continue
        theirs = {line.strip() for line in inspect.getsource(parent).splitlines()}
        ours = [ast.unparse(statement).strip() for statement in method.body]
        copied = [line for line in ours if line in theirs and not line.startswith(("return ", "super()"))]
        assert copied == []


@pytest.mark.parametrize("version", ["1.15.9", "2.0.0", "0.26.0"])
def test_a_trl_outside_the_range_is_refused(version):
    with pytest.raises(UpstreamError, match=f"^trl: got {version}; expected >=1.16,<2"):
        require_supported_trl(version)


def test_the_range_is_the_one_pyproject_declares():
    tomllib = pytest.importorskip("tomllib")
    with open("pyproject.toml", "rb") as file:
        dependencies = tomllib.load(file)["project"]["dependencies"]
    assert f"trl>={TRL_SUPPORTED[0]},<{TRL_SUPPORTED[1]}" in dependencies


def test_numbers_say_where_they_come_from():
    made = provenance("trl-drgrpo check")
    assert made["command"] == "trl-drgrpo check"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", made["date"])
    assert made["commit"] is None or re.fullmatch(r"[0-9a-f]{7,}\+?", made["commit"])
    assert re.search(r"\d+ CPU cores$", made["host"])
    assert {"trl-drgrpo", "trl", "torch"} <= made["versions"].keys()


def test_a_machine_without_git_has_no_commit(monkeypatch):
    def missing(*args, **kwargs):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    assert module.provenance("x")["commit"] is None


def test_an_installed_package_has_no_commit_of_what_is_around_it(monkeypatch, tmp_path):
    (tmp_path / ".git").mkdir()  # the user's project, with a virtual environment in it
    installed = tmp_path / "venv" / "site-packages" / "trl_drgrpo" / "upstream" / "versions.py"
    installed.parent.mkdir(parents=True)
    monkeypatch.setattr(module, "__file__", str(installed))
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, "abc1234\n", ""))
    assert module.commit() is None
