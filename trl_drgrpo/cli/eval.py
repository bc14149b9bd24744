"""`trl-drgrpo eval`: pass@1 and pass@k of a model on a dataset with a reward, against the model it was trained from.

Sample completions of a dataset's prompts, score them, and show pass@1 and pass@k with their intervals, beside the
model that training began with and the paired difference. Run it again to continue.

The table goes to standard output, progress to standard error, samples and results into files: of a run into its
`_drgrpo/evaluations`, where `trl-drgrpo report` finds them. Exit codes: 0 done, 1 a reward failed on some
completion, 2 bad input.
"""

import argparse
import gc
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from trl_drgrpo.cli import console, data
from trl_drgrpo.cli.batch import Row, completed_rows, digest, prompt_rows, refuse_low_numbers, write_result
from trl_drgrpo.cli.run_keys import (
    ANSWER_KEYS,
    EVALUATIONS,
    TRUST,
    CallSettings,
    add_keys,
    model_path,
    read_settings,
    run_folder,
)
from trl_drgrpo.common import __version__
from trl_drgrpo.common.disk import check_file, check_writable
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.ranges import RANGES, refuse_outside, whole
from trl_drgrpo.common.reading import user_path
from trl_drgrpo.common.rows import check_prompt_rows
from trl_drgrpo.common.secrets import redacted_command
from trl_drgrpo.evaluation import models
from trl_drgrpo.evaluation.results import KIND, as_json, judged, read_results, results
from trl_drgrpo.evaluation.table import is_whole, notes, put_into_card, table, title
from trl_drgrpo.features.diagnostics.statistics import CorrectnessRule
from trl_drgrpo.rewards.contract import reward_name
from trl_drgrpo.rewards.recipe_rewards import resolve_reward
from trl_drgrpo.rewards.texts import completion_text, end_on_one_line, one_line, prompt_text
from trl_drgrpo.upstream.versions import provenance

# Folder for models outside of a run.
FOLDER = "eval_output"
_DATA_KEYS = ("dataset_name", "dataset_config", "rename_columns", "reward_funcs")
_RULE_KEYS = ("correct_reward", "correct_threshold")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options to a parser."""
    add_keys(parser, (*_DATA_KEYS, *ANSWER_KEYS, *_RULE_KEYS))
    add = parser.add_argument
    with_default = partial(console.add_default, parser)
    add(
        "--vllm_server_base_url",
        metavar="URL",
        help="sample with a vLLM server that serves these models, adapters by their base; a recipe's is ignored",
    )
    add("--split", help="split to evaluate on (default: the recipe's test split, else test, else the only one)")
    add(
        "--baseline",
        metavar="MODEL",
        help="model to compare with, or none (default: the model of the run's recipe, else the adapter's base)",
    )
    with_default("--num_samples", 1, "completions per prompt")
    add("--k", type=int, nargs="+", metavar="K", help="for pass@k (default: 1, and num_samples)")
    add("--limit", type=int, help="evaluate on the first prompts only")
    with_default("--seed", 0, "sampling seed")
    with_default("--batch_size", 64, "completions per forward pass, or requests at a time")
    add("--output_dir", help=f"folder for samples and results (default: in the run's folder, else {FOLDER})")
    add("--show", type=int, default=0, metavar="N", help="print the answers to the first N prompts, of each model")
    add(
        "--pass_rates",
        type=os.path.expanduser,
        metavar="FILE",
        help="write the pass rate of each prompt, for prior_pass_rates in a recipe",
    )
    add("--no_card", action="store_true", help="leave the model's card as it is")
    add("--json", action="store_true", help="print the results as JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Evaluate, print and write."""
    settings = _checked(args)
    # The baseline comes first, as in the table.
    names = {}
    baseline = _baseline(args, settings)
    if baseline:
        names["baseline"] = baseline
    names["model"] = settings.values["model_name_or_path"]
    files = {}
    samples = {}
    with console.stdout_to_stderr():
        task = _Task(args, settings)
        try:
            for role, name in names.items():
                files[role], samples[role] = task.sampled(name)
        except KeyboardInterrupt:
            console.log("The samples so far are kept: run the same command to continue.")
            raise
    content = task.results(names, samples)
    path = task.path(names)
    console.print_result(as_json(content) if args.json else _plain_text(content))
    if args.show and not args.json:
        answers = {names[role]: rows for role, rows in samples.items()}
        console.print_result("\n".join([*_answers(answers, task, args.show), ""]))
    # Files come after what is printed: on a full disk the result is on the terminal.
    write_result(path, as_json(content))
    console.log(f"Written: {path}; samples: {files['model']}")
    if args.pass_rates:
        data.write_rates(args.pass_rates, samples["model"], task.judged(samples["model"]))
    if not args.no_card:
        _put_into_card(settings, task.output, content)
    failed = sum(model["failed"] for model in content["models"])
    if failed:
        count = f"A reward failed on {failed} completions, which count as unscorable"
        console.log(f"{count}: see `failures` in {files['model'].parent}.")
    return int(failed > 0)


def _checked(args: argparse.Namespace) -> CallSettings:
    """Return the values of a call, checked without reading data. Completes `args.k`."""
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1":
        # Each would sample everything, and write the same files.
        remedy = (
            "Start it without accelerate or torchrun; a vLLM server (--vllm_server_base_url) uses several devices."
        )
        raise InputError("eval", f"{processes} processes", "one", remedy)
    refuse_low_numbers(args, show=0, num_samples=1, batch_size=1, limit=1)
    args.k = sorted(set(args.k or (1, args.num_samples)))
    remedy = "pass@k needs at least k completions of each prompt: raise num_samples."
    for k in args.k:
        refuse_outside("k", k, whole(1, args.num_samples, remedy=remedy))
    settings = read_settings(args)
    values = settings.values
    ignored = [key for key in ("environment_factory", "tools", "rollout_func") if values.get(key)]
    if ignored:
        console.log(f"{', '.join(ignored)}: not used here. Answers are sampled in one turn, without tools.")
    if not values.get("dataset_name"):
        # A misspelled folder is taken for a Hub id, and then no run brings a dataset along.
        if args.model_name_or_path and not Path(settings.model).is_dir():
            got = f"{settings.model}, which is no folder here"
            expected = "a run's folder, or a Hub id with --dataset_name"
            remedy = f"Relative paths start at the current directory, {os.getcwd()}."
            raise InputError("model_name_or_path", got, expected, remedy)
        got = "a mixture (`datasets`)" if values.get("datasets") else "none"
        remedy = "Add for example --dataset_name test.jsonl, or `reasoning_gym:chain_sum?size=500`."
        raise InputError("dataset_name", got, "a dataset with prompts", remedy)
    if not values.get("reward_funcs"):
        remedy = "Add for example --reward_funcs math_reward; a reward model cannot tell what is correct. "
        remedy += f"A run's folder may bring rewards that run code: {TRUST}."
        raise InputError("reward_funcs", "none", "a reward for correct answers", remedy)
    baseline = _baseline(args, settings)
    if baseline:
        try:
            models.check_model("baseline", model_path(baseline))
        except InputError as error:
            remedy = f"{error.remedy} Or skip the comparison: --baseline none."
            raise InputError(error.field, error.got, error.expected, remedy) from error
    check_writable("output_dir", str(_output(args, settings)))
    if args.pass_rates:
        check_file("pass_rates", args.pass_rates, [values["dataset_name"]])
    return settings


def _baseline(args: argparse.Namespace, settings: CallSettings) -> str | None:
    """Return the model to compare with, as it was named; `None` without one."""
    if args.baseline is not None:
        return None if args.baseline.lower() == "none" else args.baseline
    return settings.trained_from or models.base_name(settings.model, settings.loading.base)


def _output(args: argparse.Namespace, settings: CallSettings) -> Path:
    """Return the folder for samples and results."""
    if args.output_dir:
        return user_path(args.output_dir)
    run = run_folder(settings.model)
    return Path(FOLDER) if run is None else run / EVALUATIONS


class _Task:
    """An evaluation. Putting it together checks rows and rewards, and loads no model."""

    def __init__(self, args: argparse.Namespace, settings: CallSettings):
        self.args = args
        self.settings = settings
        self.output = _output(args, settings)
        values = settings.values
        source = values["dataset_name"]
        # The rewards, and which of them says what is correct.
        self.rewards = {}
        for spec in values["reward_funcs"]:
            reward = resolve_reward(spec)
            self.rewards[reward_name(reward)] = reward
        refuse_outside("correct_threshold", values.get("correct_threshold"), RANGES["correct_threshold"])
        CorrectnessRule(list(self.rewards), values.get("correct_reward"))
        # The data. Of several splits none is chosen without a word: it might be the training data.
        config = values.get("dataset_config")
        splits: Any = data.load_data(source, name=config)
        split = args.split or values.get("dataset_test_split") or "test"
        if args.split is None and split not in splits and len(splits) == 1:
            split = str(next(iter(splits)))
            console.log(f"{source} has no test split: evaluating on its only one, {split}.")
        dataset = data.take_split(splits, split, source)
        rewards = [(name, reward, ()) for name, reward in self.rewards.items()]
        self.rows = prompt_rows(values, rewards, dataset, args.limit)
        check_prompt_rows(self.rows, "dataset_name", [KIND])
        # What the result depends on, of either model; it names the file of the result.
        self.facts = {
            "dataset": {
                "name": source,
                "config": config,
                "split": split,
                "prompts": len(self.rows),
                "of": len(dataset),
                "digest": digest(self.rows),
            },
            "prompt": {**settings.prompting, "chat_template_kwargs": settings.template},
            "sampling": {**asdict(settings.decoding), "num_samples": args.num_samples, "seed": args.seed},
        }

    @property
    def rule(self) -> dict[str, Any]:
        """Reward and threshold for correct completions."""
        return {key: self.settings.values.get(key) for key in _RULE_KEYS}

    def judged(self, rows: list[Row]) -> list[bool | None]:
        """Judge which samples are correct."""
        return judged(rows, list(self.rewards), *self.rule.values())

    def sampled(self, name: str) -> tuple[Path, list[Row]]:
        """Return the file of a model's samples, and all of them."""
        from trl_drgrpo.evaluation.running import check_rows_fit, sample_and_score

        args = self.args
        settings = self.settings
        # Prompts whose completions fill a batch.
        group = max(1, args.batch_size // args.num_samples)
        depends = self._depends(name, group)
        path = self.output / "samples" / f"{_slug(name)}-{digest(depends)}.jsonl"
        passed = []

        def status(rows_of_prompt: list[Row]) -> str:
            passed.extend(verdict for verdict in self.judged(rows_of_prompt) if verdict is not None)
            return f"correct {sum(passed) / len(passed):.0%}" if passed else ""

        def more(first: int) -> Iterator[tuple[int, list[Row]]]:
            server = args.vllm_server_base_url
            # A server says itself what is too long.
            if server is None:
                check_rows_fit(self.rows, model_path(name), settings.loading, settings.decoding, settings.template)
            tokenizer = models.load_tokenizer(model_path(name), settings.loading)
            rows = sample_and_score(
                self.rows,
                settings.sampler(name, tokenizer, args.batch_size, server),
                tokenizer,
                self.rewards,
                group,
                first,
                samples=args.num_samples,
                length=settings.decoding.max_completion_length,
                seed=args.seed,
                template=settings.template,
            )
            return enumerate(rows, first + 1)

        noun = f"prompts of {name}"
        rows = completed_rows(path, KIND, depends, len(self.rows), group, noun, more, status, "output_dir")
        # The next model needs the room of this one.
        gc.collect()
        return path, rows

    def _depends(self, model: str, group: int) -> dict[str, Any]:
        """Return what a model's samples and rewards depend on: they are used again where all of it is the same."""
        specs = str(self.settings.values["reward_funcs"])
        # A reward of a file may change while its name stays.
        files = {}
        for name in re.findall(r"[\w./~-]+\.py\b", specs):
            path = user_path(name)
            if path.is_file():
                files[name] = digest(path.read_text("utf-8"))
        return {
            **self.facts,
            "rewards": specs,
            "reward_files": files,
            "version": __version__,
            "model": model,
            "weights": models.weights_mark(model_path(model)),
            "loading": asdict(self.settings.loading),
            "server": self.args.vllm_server_base_url is not None,
            "batch": group,
        }

    def results(self, names: dict[str, str], samples: dict[str, list[Row]]) -> dict[str, Any]:
        """Return the result, of models and their samples by role."""
        # The command line may be that of a script which calls `main(["eval", ...])`.
        arguments = sys.argv[1:] if sys.argv[1:2] == ["eval"] else ["eval"]
        about = provenance(redacted_command(["trl-drgrpo", *arguments]))
        reward, threshold = self.rule.values()
        how = {"reward": reward or next(iter(self.rewards)), "threshold": threshold}
        models_by_role = {}
        for role, name in names.items():
            model = {"name": name, "weights": models.weights_mark(model_path(name))}
            models_by_role[role] = (model, samples[role])
        return results({**about, **self.facts, "correct": how}, models_by_role, self.args.k)

    def path(self, names: dict[str, str]) -> Path:
        """Return the file of the result. `names`: of the models, by role."""
        dataset = self.facts["dataset"]
        depends = {**self.facts, **self.rule, **names, "rewards": self.settings.values["reward_funcs"]}
        return self.output / f"{_slug(dataset['name'])}-{dataset['split']}-{digest(depends)[:8]}.json"


def _answers(samples: dict[str, list[Row]], task: _Task, prompts: int) -> list[str]:
    """Return lines with the first answer of each model to the first prompts; a plus is in front of correct ones."""
    verdicts = {name: task.judged(rows) for name, rows in samples.items()}
    signs = {True: "+", False: "-", None: "?"}
    width = max(map(len, samples))
    some_rows = next(iter(samples.values()))
    # The first completion of each prompt; all models have the same prompts in the same places.
    places = [place for place, row in enumerate(some_rows) if row[KIND]["row"] == 0]
    lines = []
    for place in places[:prompts]:
        lines += ["", end_on_one_line(prompt_text(some_rows[place]["prompt"]), 200)]
        for name, rows in samples.items():
            answer = one_line(completion_text(rows[place]["completion"]), 100)
            lines.append(f"  {name:{width}}  {signs[verdicts[name][place]]} {answer}")
    return lines


def _plain_text(content: dict[str, Any]) -> str:
    """Return title, table and notes for a terminal."""
    head, rows = table(content)
    return "\n".join([title(content), "", *console.aligned([head, *rows]), "", *notes(content)]) + "\n"


def _slug(name: str) -> str:
    """Return the end of a name as part of a file's name: `reasoning_gym:lcm?size=9` as `reasoning-gym-lcm`."""
    last = name.partition("?")[0].rstrip("/").rpartition("/")[2]
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", last).strip("-.")
    return slug.removesuffix(".jsonl")[:40] or "data"


def _put_into_card(settings: CallSettings, output: Path, content: dict[str, Any]) -> None:
    """State in the card of a run all evaluations of these weights on a whole split; leave the folder of any other
    model alone."""
    readme = Path(settings.model) / "README.md"
    if run_folder(settings.model) is None or not readme.is_file():
        return
    if not is_whole(content):
        prompts = content["dataset"]["prompts"]
        console.log(f"Not stated in the model card, as it is of the first {prompts} prompts only.")
        return
    # The trained model is the last one, behind its baseline.
    weights = content["models"][-1]["weights"]
    evaluations = []
    for evaluation in read_results(output):
        model = evaluation["models"][-1]
        if model.get("weights") == weights and is_whole(evaluation):
            evaluations.append(evaluation)
    # A card is somebody's text: where it cannot be edited, the numbers are written all the same.
    try:
        put_into_card(readme, evaluations)
        console.log(f"Stated in the model card: {readme}")
    except (OSError, ValueError) as error:
        console.log(f"{readme} stays as it is: {type(error).__name__}: {error}")
