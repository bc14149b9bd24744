"""A folder of somebody else's: whatever it holds, naming it as the model, the data or the run executes none of it."""

import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from runs import write_lines

from trl_drgrpo.cli.main import main
from trl_drgrpo.cli.run_keys import kept_recipe, run_folder
from trl_drgrpo.rewards.recipe_rewards import needs_trust

VARIABLE = "TRL_DRGRPO_CANARY"


class Payload:
    """Unpickles as a file that is made."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """A file that exists once any code of the folder has run."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path / "it-ran"


@pytest.fixture
def foreign(marker, saved_model, tmp_path):
    """A run's folder with a model, a checkpoint and an adapter, and code wherever a library might look for it."""
    run = tmp_path / "downloads" / "run"
    shutil.copytree(saved_model, run)
    code = f"open({str(marker)!r}, 'w')\ndef score(completions, **kwargs): return [1.0] * len(completions)\n"
    code += "Config = Model = Tokenizer = generate = dict\n"
    for name in ("evil.py", "custom_generate/generate.py", "trl.py", "math_verify.py", "yaml.py", "run.py"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(code)
    classes = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoTokenizer": ["evil.Tokenizer"] * 2}
    classes |= {f"AutoModelFor{name}": "evil.Model" for name in ("CausalLM", "TokenClassification")}
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps({**content, "auto_map": classes}))
    (run / "chat_template.jinja").write_text(
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    pickled = pickle.dumps(Payload(marker))
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (run / name).write_bytes(pickled)
    reward = f"{run}/evil.py:score"
    recipe = {
        "model_name_or_path": str(run),
        "trust_remote_code": True,
        "dataset_name": str(tmp_path / "rows.jsonl"),
        "reward_funcs": [reward],
        "step_reward_funcs": [reward],
        "tools": [reward],
        "environment_factory": reward,
        "rollout_func": reward,
        "max_completion_length": 4,
        "env": {VARIABLE: "1", "PYTHONPATH": str(run)},
    }
    for log in (run / "_drgrpo", run.parent / "_drgrpo"):
        log.mkdir()
        (log / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        (log / "run.json").write_text('{"format": 1, "prompts": "texts"}')
    state = {"log_history": [{"step": 1, "reward": 0.5}], "global_step": 0, "epoch": 0.0, "train_batch_size": 2}
    (run / "trainer_state.json").write_text(json.dumps(state))
    shutil.copytree(run, run / "checkpoint-1", ignore=shutil.ignore_patterns("_drgrpo", "checkpoint-1"))
    adapter = run / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "base_model_name_or_path": str(run), "r": 1, "target_modules": ["q_proj"]}
    settings |= {"auto_mapping": {"base_model_class": "Model", "parent_library": "evil"}}
    settings |= {"megatron_config": {"a": 1}, "megatron_core": "evil", "task_type": "CAUSAL_LM"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    (adapter / "adapter_model.bin").write_bytes(pickled)
    write_lines(tmp_path / "rows.jsonl", [{"prompt": f"{i}+1=", "completion": "2", "solution": "2"} for i in range(4)])
    labeled = [{"prompt": "1+1=", "steps": ["2", "2"], "labels": [True, False]}] * 4
    write_lines(tmp_path / "labeled.jsonl", labeled)
    return run


TRAIN = "--dataset_name rows.jsonl --reward_funcs math_reward --use_cpu --bf16 false --max_steps 1 --num_generations 2"
TRAIN += " --per_device_train_batch_size 2 --max_completion_length 4 --report_to none --output_dir out"
COMMANDS = {
    "generate": "generate --model {run} 1+1=",
    "of a checkpoint": "generate --model {run}/checkpoint-1 1+1=",
    "of a model without a recipe of its own": "generate --model {run}/../plain 1+1=",
    "of an adapter": "generate --model {run}/adapter 1+1=",
    "eval": "eval --model {run} --num_samples 1",
    "eval with a reward": "eval --model {run} --reward_funcs math_reward --baseline none",
    "score": "score --data {run}",
    "score a file": "score --data rows.jsonl --reward_funcs math_reward --tokenizer {run}",
    "score with its model": "score --data rows.jsonl --step_reward_funcs {run}",
    "merge": "merge {run}/adapter --output merged",
    "plan": "plan --model {run} --memory 24GB",
    "report": "report {run} --output page.html",
    "search": "search --model {run} --dataset_name rows.jsonl --strategy best_of_n --budget_tokens 4"
    " --output found.jsonl --reward_funcs math_reward --max_completion_length 2",
    "label-steps": "label-steps --model {run} --data rows.jsonl --reward math_reward --output labels.jsonl"
    " --rollouts 1 --max_new_tokens 2",
    "train-prm": "train-prm --model {run} --data labeled.jsonl --output_dir prm --max_steps 1",
    "train": f"train --model_name_or_path {{run}} {TRAIN}",
    "resume": f"train --model_name_or_path {{run}} {TRAIN} --resume_from_checkpoint {{run}}/checkpoint-1",
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_no_command_runs_what_a_folder_brings(command, foreign, marker, saved_model, monkeypatch, capfd):
    shutil.copytree(saved_model, foreign.parent / "plain")
    monkeypatch.setattr(sys, "stdin", None)  # nobody is asked whether to trust it
    with contextlib.suppress(pickle.UnpicklingError):  # torch refuses the optimizer's state
        main(command.format(run=foreign).split())
    said = capfd.readouterr().err
    assert not marker.exists(), said
    assert VARIABLE not in os.environ
    assert "Traceback" not in said


def test_omitted_parts_of_a_foreign_folder_are_named_once_and_can_be_had(foreign, marker, capfd):
    assert main(["generate", "--model", str(foreign), "1+1="]) == 0
    [line] = [line for line in capfd.readouterr().err.splitlines() if "not taken" in line]
    assert "trust_remote_code, env. --trust_recipe takes them" in line
    assert "reward_funcs" not in line  # which this command does not read
    assert main(["eval", "--model", str(foreign)]) == 2
    said = capfd.readouterr().err
    assert "trust_remote_code, reward_funcs, env" in said
    assert said.splitlines()[-1].startswith("error: reward_funcs: got none")
    assert "--trust_recipe" in said.splitlines()[-1]
    assert main(["score", "--data", str(foreign)]) == 2
    assert "reward_funcs, step_reward_funcs, env" in capfd.readouterr().err
    assert main(["label-steps", "--model", str(foreign), "--output", "labels.jsonl"]) == 2
    assert "trust_remote_code, reward_funcs, env" in capfd.readouterr().err
    assert not marker.exists()
    recipe = yaml.safe_load(kept_recipe(str(foreign)).read_text())
    kept_recipe(str(foreign)).write_text(yaml.safe_dump({**recipe, "trust_remote_code": False, "env": {}}))
    assert main(["eval", "--model", str(foreign), "--trust_recipe", "--baseline", "none"]) == 0
    assert marker.exists()
    assert "not taken" not in capfd.readouterr().err


def test_a_named_recipe_is_trusted(foreign, marker, monkeypatch, capfd):
    monkeypatch.setattr(os, "environ", {**os.environ})
    main(["eval", "--model", str(foreign), "--config", str(kept_recipe(str(foreign))), "--limit", "0"])
    assert "not taken" not in capfd.readouterr().err


def test_a_folder_beside_a_log_is_not_of_its_run(foreign):
    (foreign.parent / "other").mkdir()
    assert run_folder(str(foreign.parent / "other")) is None
    assert run_folder(str(foreign / "adapter")) is None
    assert run_folder(str(foreign / "checkpoint-1")) == foreign


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("math_reward", False),
        ("accuracy_reward", False),
        ({"regex_reward": {"pattern": "a"}}, False),
        ({"clipped": "math_reward"}, False),
        ({"gated": {"reward": "math_reward", "gate": {"format_reward": {}}}}, False),
        ({"weighted_sum": {"parts": [["math_reward", 1.0], ["format_reward", 0.5]]}}, False),
        ("mine.py:score", True),
        ("package.module.score", True),
        ("some/model", True),
        ({"isolate": "mine.py:score"}, True),
        ({"isolate": {"reward": "mine.py:score"}}, True),
        ({"weighted_sum": [["mine.py:score", 1.0]]}, True),
        ({"weighted_sum": {"parts": {"mine.py:score": 1.0}}}, True),
        ({"weighted_sum": {"parts": {"one": ["mine.py:score", 1.0]}}}, True),
        ({"gated": {"reward": "math_reward", "gate": "mine.py:score"}}, True),
        ({"clipped": {"reward": {"isolate": {"reward": "a.b.c"}}}}, True),
        ({"verl": "mine.py:score"}, True),
        ({"trl": "package.score"}, True),
        ({"judge_reward": {"model": "m", "base_url": "http://evil", "api_key_env": "HF_TOKEN"}}, True),
        ({"step_judge": {"model": "m", "base_url": "http://evil"}}, True),
        ({"code_reward": {"sandbox": "none"}}, True),
        ({"prm": {"model": "some/model", "trust_remote_code": True}}, True),
    ],
)
def test_rewards_that_a_folder_may_name(spec, expected):
    assert needs_trust(spec) is expected


def test_the_command_imports_nothing_from_the_folder_it_runs_in(foreign, marker):
    script = Path(sys.executable).parent / "trl-drgrpo"
    if not script.exists():
        pytest.skip("the package is not installed as a command")
    argv = [script, "score", "--data", "../../rows.jsonl", "--reward_funcs", "math_reward", "--json"]
    ended = subprocess.run(argv, cwd=foreign, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert not marker.exists()
