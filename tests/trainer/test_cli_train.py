"""`trl-drgrpo train` end to end on a tiny local model, its dry run, and every input that cannot work."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from case_tables import DATA, cases
from runs import read_lines, write_lines, written_elsewhere
from safetensors.torch import load_file

from trl_drgrpo.cli.main import main
from trl_drgrpo.cli.run_keys import kept_recipe, was_trained_on_messages
from trl_drgrpo.rewards import columns


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with data (a training and a test split) and a file of rewards."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        rows = [{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in range(8)]
        write_lines(tmp_path / "data" / f"{split}.jsonl", rows)
    write_lines(
        tmp_path / "gaps.jsonl", [{**row, "answer": None if i == 5 else row["answer"]} for i, row in enumerate(rows)]
    )
    (tmp_path / "mine.py").write_text((DATA / "train_rewards.txt").read_text())
    return tmp_path


@pytest.fixture
def recipe(folder, saved_model):
    """Writes a recipe that trains for two steps; keywords change it, `None` takes a key out."""

    def write(**changes):
        values = {"model_name_or_path": saved_model, "dataset_name": "data", "rename_columns": ["question=prompt"]}
        values |= {"reward_funcs": ["mine.py:varied"], "output_dir": "out", "max_steps": 2, "learning_rate": 1e-2}
        values |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4}
        values |= {"max_completion_length": 8, "gradient_checkpointing": False, "report_to": "none"}
        values |= {"logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, **changes}
        values = {key: value for key, value in values.items() if value is not None}
        (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
        return ["train", "--config", str(folder / "recipe.yaml")]

    return write


def moved(saved_model, output_dir) -> bool:
    before = load_file(Path(saved_model) / "model.safetensors")
    after = load_file(Path(output_dir) / "model.safetensors")
    return any(not torch.equal(before[name], after[name]) for name in before)


def test_train_prints_a_result_and_one_line_of_progress(recipe, saved_model, ran):
    out, err = ran(recipe())
    result = yaml.safe_load(out)  # stdout holds the result and nothing else
    assert result.keys() == {"output_dir", "steps", "reward_first", "reward_last"}
    assert (result["output_dir"], result["steps"]) == ("out", 2)
    assert "step 2/2" in err
    assert "'loss'" not in err  # one line of progress, not every metric
    assert "reward in training: " in err
    assert [line.split()[:2] for line in err.partition("Next:\n")[2].splitlines()] == [
        *(["trl-drgrpo", name] for name in ("report", "eval", "generate")),
        ["hf", "upload"],
    ]
    kept = kept_recipe("out")
    again = ran(["train", "--config", str(kept), "--output_dir", "other", "--dry_run"])
    assert yaml.safe_load(again.out)["reward_funcs"] == ["mine.py:varied"]
    assert was_trained_on_messages("out") is False
    assert moved(saved_model, "out")
    # The keywords that `check_columns` relies on are those that TRL passes, and the columns but `prompt`.
    assert set(Path("keywords.txt").read_text().split()) == {*columns.ALWAYS_PASSED, "answer"}


def test_an_interrupted_run_and_one_that_is_asked_to_end_say_how_to_go_on(recipe, ran, capfd):
    argv = recipe(reward_funcs=["mine.py:interrupting"], save_strategy="steps", save_steps=1, output_dir="first")
    safe, last = ran(argv, 130).err.splitlines()[-2:]
    go_on = "Saved: {0}. To continue: the same command with --resume_from_checkpoint {0}, without --overwrite"
    go_on += "_output_dir."
    assert (safe, last) == (go_on.format("first/checkpoint-1"), "interrupted")
    argv = recipe(reward_funcs=["mine.py:terminating"], max_steps=4)
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 143
    out, err = capfd.readouterr()
    assert (out, err.splitlines()[-1]) == ("", go_on.format("out/checkpoint-2"))
    assert json.loads(Path("out/_drgrpo/run.json").read_text())["ended"]["how"] == "failed: Terminated"
    assert yaml.safe_load(ran([*argv, "--resume_from_checkpoint", "out/checkpoint-2"]).out)["steps"] == 4


def test_a_run_that_is_asked_to_end_before_its_first_step_leaves_nothing(recipe, monkeypatch, caplog):
    monkeypatch.setattr("trl_drgrpo.cli.job.prepare", lambda given: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        main(recipe())
    assert (ended.value.code, signal.getsignal(signal.SIGTERM)) == (143, before)
    assert [each.getMessage() for each in caplog.records if "SIGTERM" in each.getMessage()] == [
        "SIGTERM: nothing is saved beyond what out already holds."
    ]
    assert not Path("out").exists()


def test_a_folder_to_which_another_process_writes(recipe, ran):
    argv = recipe()
    with written_elsewhere("out") as holder:
        error = ran(argv, 2).err
        ran([*argv, "--dry_run"])  # it only reads
    assert error.startswith(f"error: output_dir: got out, to which process {holder.pid} on ")
    assert error.count("\n") == 1


def test_train_with_lora_evaluation_checkpoint_and_resume(recipe, ran):
    adapter = {"use_peft": True, "lora_target_modules": "all-linear"}
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
    argv = recipe(**adapter, **evaluation, save_strategy="steps", save_steps=1)
    ran([*argv, "--max_steps", "1"])
    assert Path("out/adapter_config.json").is_file()
    assert Path("out/checkpoint-1").is_dir()
    out, err = ran([*argv, "--resume_from_checkpoint", "true"])
    result = yaml.safe_load(out)
    assert result["steps"] == 2
    assert {"eval_reward_first", "eval_reward_last"} <= set(result)
    assert "evaluation at step 2" in err


def test_early_stopping(recipe, ran):
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
    best = {"save_strategy": "best", "metric_for_best_model": "eval_reward", "load_best_model_at_end": True}
    rewards = ["mine.py:worse_and_worse"]
    argv = recipe(reward_funcs=rewards, max_steps=4, early_stopping_patience=1, **evaluation, **best)
    assert yaml.safe_load(ran(argv).out)["steps"] == 2
    assert [path.name for path in Path("out").glob("checkpoint-*")] == ["checkpoint-1"]
    best, saved = (load_file(f"out/{name}model.safetensors") for name in ("checkpoint-1/", ""))
    assert all(torch.equal(best[name], saved[name]) for name in best)


def test_a_full_disk_a_second_run_and_a_resumed_one(recipe, monkeypatch, ran):
    argv = recipe(save_strategy="steps", save_steps=1)
    save = torch.save

    def full(content, path, *args, **kwargs):
        if str(path).endswith("checkpoint-2/optimizer.pt"):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return save(content, path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        error = ran(argv, 1).err.splitlines()[-1]
    assert error.startswith("error: disk full: out/checkpoint-2/optimizer.pt could not be written")
    assert f"The run up to {Path('out/checkpoint-1').resolve()} is saved" in error
    go_on = re.search(r"--resume_from_checkpoint (\S+)", error)

    with monkeypatch.context() as patch:
        patch.setattr("trl_drgrpo.cli.job.prepare", lambda given: pytest.fail("refused too late"))
        assert "error: output_dir: got out, which holds another run (checkpoint-1);" in ran(argv, 2).err
        both = ran([*argv, "--resume_from_checkpoint", "true", "--overwrite_output_dir", "true"], 2)
        assert "overwrite_output_dir: got true beside resume_from_checkpoint true" in both.err
    out, err = ran([*argv, *go_on.group().split()])
    assert yaml.safe_load(out)["steps"] == 2
    assert "starting from scratch" not in err


def test_dry_run_is_a_recipe_and_loads_no_model(recipe, folder, monkeypatch, ran):
    monkeypatch.setattr("trl.GRPOTrainer.__init__", lambda *a, **k: pytest.fail("a model was about to load"))
    monkeypatch.setenv("TRL_DRGRPO_TEST", "before")
    own = {"scale_rewards": False, "hub_token": "hf_secret", "beta": 0.0, "temperature": 1.0, "lora_r": 16}
    argv = [*recipe(**own, env={"TRL_DRGRPO_TEST": 5}), "--dry_run", "--learning_rate", "3e-4"]
    out = ran(argv).out
    assert os.environ["TRL_DRGRPO_TEST"] == "5"  # set before anything else
    shown = yaml.safe_load(out)
    assert shown["scale_rewards"] == "none"
    assert shown["loss_normalizer"] == 8  # max_completion_length
    assert {"loss_type", "beta", "advantage_baseline", "num_generations"} <= set(shown)
    assert shown["learning_rate"] == 3e-4  # the flag wins over the recipe's 1e-2
    assert "gradient_accumulation_steps" in shown
    assert not {"hub_token", "temperature", "lora_r"} & set(shown)  # a secret, and values equal to the default
    assert "hf_secret" not in out
    assert "# rows per optimizer step: 8 (4 per device x 2 accumulated x 1 process)" in out
    assert "# prompts per optimizer step: 2\n" in out
    assert "# train data: 8 rows, columns prompt, answer" in out
    assert not Path("out").exists()
    (folder / "again.yaml").write_text(out)
    assert yaml.safe_load(ran(["train", "--config", "again.yaml", "--dry_run"]).out) == shown


def test_pass_rates_of_one_run_guide_the_next(recipe, folder, ran):
    """The prompts of the table that a run logs are those of the next run: a message list here."""
    fields = {"reward_funcs": ["mine.py:odd"], "system_prompt": "Add.", "max_steps": 1}
    ran(recipe(**fields, log_completions=True, output_dir="first"))
    argv = ["--rewards", "mine.py:odd", "--data", "first/completions", "--pass_rates", "rates.jsonl"]
    said = ran(["score", *argv]).err
    rates = read_lines("rates.jsonl")
    assert [rate["completions"] for rate in rates] == [4, 4]
    assert all(rate["prompt"].startswith("Add. ") for rate in rates)
    assert "Pass rates of 2 prompts by odd: rates.jsonl" in said

    write_lines("rates.jsonl", [{**rate, "pass_rate": 0.0} for rate in rates])
    guided = recipe(**fields, curriculum=True, prior_pass_rates="rates.jsonl", max_sampling_rounds=2, save_steps=1)
    ran([*guided, "--save_strategy", "steps"])
    state = json.loads(Path("out/checkpoint-1/drgrpo_features.json").read_text())["PromptSampling"]
    assert {rate["key"] for rate in rates} <= set(state["pass_rates"]["counts"])
    strangers = recipe(**{**fields, "system_prompt": "Subtract."}, prior_pass_rates="rates.jsonl")
    said = ran([*strangers, "--output_dir", "other", "--curriculum", "--max_sampling_rounds", "2"], 2).err
    assert "rates.jsonl, which has none of the prompts; expected pass rates of the same prompts." in said


@pytest.mark.parametrize(("source", "named"), [("data", None), ("some/name", "some/name")])
def test_push_to_hub_names_only_a_hub_dataset(recipe, monkeypatch, ran, source, named):
    from trl_drgrpo.cli import data
    from trl_drgrpo.trainer import DrGRPOTrainer

    calls = []
    load = data.load_data
    monkeypatch.setattr(data, "load_data", lambda _, **keywords: load("data", **keywords))
    monkeypatch.setattr(DrGRPOTrainer, "init_hf_repo", lambda self, *a: setattr(self, "hub_model_id", "me/it"))
    monkeypatch.setattr(DrGRPOTrainer, "push_to_hub", lambda self, **keywords: calls.append(keywords))
    assert "https://huggingface.co/me/it" in ran(recipe(dataset_name=source, push_to_hub=True, max_steps=1)).err
    assert calls[-1] == {"dataset_name": named}


def test_a_mixture_of_datasets(recipe, folder, ran):
    entry = {"path": "json", "data_files": str(folder / "data" / "train.jsonl")}
    argv = recipe(dataset_name=None, datasets=[entry, {**entry, "columns": ["question", "answer"]}])
    assert "# train data: 16 rows" in ran([*argv, "--dry_run"]).out


def test_the_flags_mean_what_they_mean_to_trl(recipe):
    """The same command line gives the same four dataclasses as TRL's parser."""
    from trl import TrlParser

    from trl_drgrpo.cli import flags, job
    from trl_drgrpo.cli.main import parse
    from trl_drgrpo.cli.recipe import read_given

    argv = [
        *recipe(
            dataset_name="data", lr_scheduler_type="cosine", lr_scheduler_kwargs={"num_cycles": 2}, eval_strategy="no"
        ),
        *["--use_peft", "--no_shuffle_dataset", "--learning-rate", "1e-4", "--dtype", "bfloat16"],
        *["--lora_target_modules", "q_proj", "v_proj", "--num_generations_eval", "none", "--reward_weights", "1"],
        *["--pad_to_multiple_of", "4", "--model_init_kwargs", '{"use_cache": false}', "--vllm_mode=server"],
    ]
    given = read_given(parse(argv))
    theirs = TrlParser([flags.import_dataclass(name) for name in flags.DATACLASSES]).parse_args_and_config(argv[1:])
    for name, expected in zip(flags.DATACLASSES, theirs, strict=True):
        built = job.build(name, given)
        different = {k for k, v in vars(expected).items() if vars(built)[k] != v}
        assert not different - {"derived", "distributed_state", "deepspeed_plugin"}, name


@pytest.mark.parametrize(("_", "changes", "message"), cases("cli.tsv", "train"))
def test_bad_input_is_one_line_before_a_model_loads(_, changes, message, recipe, monkeypatch, ran):
    loads = "trl_drgrpo.upstream.trl_overrides.HostTrainer.__init__"
    monkeypatch.setattr(loads, lambda *a, **k: pytest.fail("a model was about to load"))
    changes = yaml.safe_load(changes)
    out, err = ran(recipe(**changes), 2)
    assert out == ""
    assert "Traceback" not in err
    error = err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    if changes.keys() <= {"report_to", "model_init_kwargs"}:  # a dry run checks inputs and model as the trainer does
        assert message in ran([*recipe(**changes), "--dry_run"], 2).err


def test_the_dry_run_tries_rewards_in_the_form_of_the_prompts(recipe, ran):
    for_text = {"trl": {"function": "think_format_reward", "completions_as": "messages"}}
    assert "fails on texts" in ran([*recipe(reward_funcs=["think_format_reward"]), "--dry_run"], 2).err
    ran([*recipe(reward_funcs=[for_text]), "--dry_run"])
    ran([*recipe(reward_funcs=["think_format_reward"], system_prompt="Think."), "--dry_run"])


def test_a_reward_that_breaks_its_contract_is_one_line_and_the_run_is_saved(recipe, folder, ran):
    err = ran(recipe(reward_funcs=["mine.py:short_later"]), 2).err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("error: reward function 'short_later': got 1 rewards; expected a list of 8")
    assert (folder / "out" / "checkpoint-1").exists()


@pytest.mark.slow
def test_two_processes_print_one_result(recipe):
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "trl_drgrpo.cli.main"]
    dry = subprocess.run([*launch, *recipe(), "--dry_run"], capture_output=True, text=True, timeout=300)
    assert dry.stdout.count("# rows per optimizer step: 16 (4 per device x 2 accumulated x 2 processes)") == 1
    done = subprocess.run([*launch, *recipe()], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["steps"] == 2  # two documents would not parse as one mapping


def test_the_qlora_preset_trains_an_adapter_on_a_4_bit_base(recipe, ran):
    assert yaml.safe_load(ran(recipe(preset="qlora", learning_rate=None, lora_r=2)).out)["steps"] == 2
    adapter = json.loads(Path("out/adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"], adapter["lora_dropout"]) == (2, 32, 0.0)  # what is given wins
    assert {"q_proj", "down_proj"} <= {name.rpartition(".")[2] for name in adapter["target_modules"]}
    log = read_lines("out/_drgrpo/metrics.jsonl")
    assert json.loads(Path("out/_drgrpo/run.json").read_text())["settings"]["learning_rate"] == 1e-5
    assert log[0]["logs"]["learning_rate"] == 1e-5
    weights = load_file("out/adapter_model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.float32}
    assert all(w.any() for name, w in weights.items() if "lora_B" in name)  # it has moved away from 0


def test_the_dry_run_shows_what_the_preset_sets_and_stays_a_recipe(recipe, folder, ran):
    out = ran([*recipe(learning_rate=None), "--preset", "qlora", "--lora_r", "4", "--dry_run"]).out
    shown = yaml.safe_load(out)
    assert (shown["preset"], shown["lora_r"]) == ("qlora", 4)
    assert "learning_rate" not in shown  # on another device the preset chooses anew
    (line,) = [line for line in out.splitlines() if line.startswith("# preset qlora sets, on this device: ")]
    assert "learning_rate 1e-05" in line
    assert "load_in_4bit True" in line
    assert "lora_r" not in line
    (folder / "again.yaml").write_text(out)
    assert ran(["train", "--config", "again.yaml", "--dry_run"]).out == out
