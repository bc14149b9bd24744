"""`trl-drgrpo score`: rewards and step rewards over saved completions, before a run or on those that one has logged.

Score saved completions and show, for each reward, mean, spread, failures, share of None and time, and the rows on
which two rewards (or a reward and its logged value) differ; for each step reward also how well it tells good steps
from bad ones (by labels, where rows have them) and correct completions from incorrect ones (by the first reward, else
a column `correct`).

The tables go to standard output; progress, tracebacks and what rewards print go to standard error. Exit codes: 0
done, 1 a reward failed on some row, 2 bad input.
"""

import argparse
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from trl_drgrpo.cli import console
from trl_drgrpo.cli.batch import Row, prompt_rows, refuse_low_numbers, write_rows
from trl_drgrpo.cli.data import checked_renamings, write_rates
from trl_drgrpo.cli.recipe import reward_spec
from trl_drgrpo.cli.run_keys import EVALUATIONS, LOG_FOLDER, TRUST, add_trust, brought_values
from trl_drgrpo.common.disk import check_file
from trl_drgrpo.common.errors import InputError, require_package
from trl_drgrpo.evaluation.results import KIND, read_results
from trl_drgrpo.features.diagnostics.run_log import COLUMN_CHARACTERS, RUN, logged_prompt
from trl_drgrpo.features.diagnostics.statistics import CorrectnessRule
from trl_drgrpo.process_rewards.named import step_reward
from trl_drgrpo.process_rewards.steps import DEFAULT_SEPARATOR
from trl_drgrpo.process_rewards.steps.segmenter import Interval, segmenter_without_turns
from trl_drgrpo.report.records import RecordedCompletions, read_object
from trl_drgrpo.report.run_folders import read_run
from trl_drgrpo.rewards import scoring
from trl_drgrpo.rewards.columns import ask, check_columns, required
from trl_drgrpo.rewards.contract import reward_name
from trl_drgrpo.rewards.recipe_rewards import resolve_reward
from trl_drgrpo.rewards.scoring import RewardScores
from trl_drgrpo.rewards.texts import completion_text, prompt_key

# In front of the name of a reward whose value is in the file.
LOGGED = "logged "
FIELDS = ("reward_funcs", "step_reward_funcs")
Rows = list[Row]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options to a parser."""
    add = parser.add_argument
    with_default = partial(console.add_default, parser)
    add(
        "--reward_funcs",
        "--rewards",
        dest="reward_funcs",
        nargs="+",
        default=[],
        metavar="REWARD",
        help="names, file.py:f or {name: {option: value}}",
    )
    add(
        "--step_reward_funcs",
        nargs="+",
        default=[],
        metavar="REWARD",
        help="process reward models (a folder, or as in a recipe) and step verifiers",
    )
    add("--config", metavar="YAML", help="recipe whose rewards are meant (default: that of the run in --data)")
    add_trust(parser)
    add(
        "--data",
        type=os.path.expanduser,
        required=True,
        help=(
            "completions: .jsonl, .csv, .parquet (as log_completions writes them), a folder of such files, or a "
            "run (what it logged, sampled in an evaluation, or recorded)"
        ),
    )
    add(
        "--dataset_name",
        "--dataset",
        dest="dataset",
        help="data with prompt and the columns that --data lacks, joined by the prompt (default: the recipe's)",
    )
    add(
        "--rename_columns",
        "--columns",
        dest="columns",
        nargs="+",
        default=[],
        metavar="OLD=NEW",
        help="for example answer=solution",
    )
    add("--tokenizer", help="folder or Hub id, for rewards that read completion_ids")
    add(
        "--step_separator",
        help="as in train, for completions without a column steps (default: the recipe's, else an empty line)",
    )
    with_default("--step_threshold", 0.5, "a step scored below it is an error")
    add("--limit", type=int, help="score only the first rows")
    add(
        "--batch_size",
        type=int,
        help="rows per call; 1 reports time and failure per row (default: 1, of step rewards 32)",
    )
    with_default("--show", 5, "rows per list")
    add(
        "--output",
        type=os.path.expanduser,
        help="JSON Lines file to write: each row with its scores, of step rewards one per step",
    )
    add(
        "--plot",
        type=os.path.expanduser,
        metavar="FILE",
        help="PNG file to write: the calibration of the step rewards",
    )
    add(
        "--pass_rates",
        type=os.path.expanduser,
        metavar="FILE",
        help="JSON Lines file to write: the pass rate of each prompt by the first reward, for prior_pass_rates",
    )
    add(
        "--correct_threshold",
        type=float,
        help="a completion passes if the first reward is at least this; needed unless its rewards are 0 and 1",
    )
    add("--json", action="store_true", help="print the results as JSON instead of tables")


@dataclass
class _Part:
    """Completions of one model, scored.

    Args:
        name (`str`): The model, where the data holds completions of several; empty otherwise.
        rows (`list[dict]`): The completions.
        scores, step_scores (`list[RewardScores]`): Of the rewards and of the step rewards.
        values (`dict[str, list]`): Rewards by name, those that the data had already included.
        disagreements (`list[dict]`): Rewards that differ.
        summaries, step_summaries (`dict[str, dict]`): Results of each reward and step reward, ready for JSON.
    """

    name: str
    rows: Rows
    scores: list[RewardScores]
    step_scores: list[RewardScores]
    values: dict[str, list]
    disagreements: Rows
    summaries: dict[str, Any]
    step_summaries: dict[str, Any]

    def content(self) -> dict[str, Any]:
        """Return the results as they stand in JSON."""
        return {"rewards": self.summaries, "disagreements": self.disagreements, "step_rewards": self.step_summaries}

    def print(self, show: int) -> None:
        """Print the results as tables, each list to `show` rows."""
        if self.name:
            print(f"{self.name}\n")
        _print_summaries(self.summaries | self.step_summaries, len(self.rows), show)
        for disagreement in self.disagreements:
            _print_disagreement(disagreement, self.rows, self.values, show)
        for scores in self.step_scores:
            _print_steps(scores, self.step_summaries[scores.name], self.rows, show)


def run(args: argparse.Namespace) -> int:
    """Score and print; 1 where a reward failed on some row."""
    _check(args)
    recipe, specs = _specs(args)
    # The data are read before anything heavy is imported for a reward.
    rows_of_models = {name: _read(args, recipe, path) for name, path in _sources(args.data).items()}
    parts = []
    with console.stdout_to_stderr():
        rewards = _resolved(specs, "reward_funcs", resolve_reward)
        step_rewards = _resolved(specs, "step_reward_funcs", step_reward)
        for name, rows in rows_of_models.items():
            parts.append(_scored_part(args, recipe, name, rows, rewards, step_rewards))
    has_failed = False
    for part in parts:
        for scores in part.scores + part.step_scores:
            has_failed |= scores.num_failed > 0
            if scores.traceback:
                console.log(f"{scores.name}, its first failure:\n{scores.traceback.rstrip()}")
    trained = parts[-1]
    if args.json:
        content = trained.content()
        if len(parts) > 1:
            content["data"] = trained.name
            content["others"] = [{"data": part.name, **part.content()} for part in parts[:-1]]
        print(json.dumps(content, indent=2))
    else:
        for number, part in enumerate(parts):
            if number:
                print()
            part.print(args.show)
    # Files come last: what was scored is on the terminal, should a disk be full.
    if args.output is not None:
        write_rows(args.output, chain.from_iterable(map(_with_scores, parts)))
    if args.plot is not None:
        from trl_drgrpo.evaluation.steps import draw

        draw(trained.step_summaries, Path(args.plot))
    # Pass rates are the very last: they may be refused, and the scores are written by then.
    if args.pass_rates is not None:
        scores = trained.scores[0]
        correct = _judged(scores, args.correct_threshold)
        if correct is None:
            remedy = "Set the lowest reward that passes: --correct_threshold."
            raise InputError("pass_rates", f"rewards of {scores.name} other than 0 and 1", "pass or fail", remedy)
        write_rates(args.pass_rates, trained.rows, correct, f" by {scores.name}")
    return int(has_failed)


def _scored_part(
    args: argparse.Namespace,
    recipe: dict[str, Any],
    name: str,
    rows: Rows,
    rewards: dict[str, Any],
    step_rewards: dict[str, Any],
) -> _Part:
    """Score the completions of one model."""
    # Without the columns of TRL's table; with those that rewards read.
    rows, logged = _split_logged(rows, list(rewards))
    if args.tokenizer is not None:
        from trl_drgrpo.process_rewards.loading import load_tokenizer

        tokenizer = load_tokenizer(args.tokenizer, None)
        for row in rows:
            text = completion_text(row["completion"])
            row["completion_ids"] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if step_rewards:
        separator = args.step_separator
        if separator is None:
            separator = recipe.get("step_separator")
        if separator is None:
            separator = DEFAULT_SEPARATOR
        rows = _with_steps(rows, separator)
    for key, reward in {**rewards, **step_rewards}.items():
        _check_reward(key, reward, rows, key in step_rewards)
    # Scores. A rule is called row by row, so that a failure has its row; a model is worth a batch.
    scores = []
    values: dict[str, Any] = {}
    summaries = {}
    for key, reward in rewards.items():
        of_reward = _scored(key, reward, rows, args.batch_size or 1)
        scores.append(of_reward)
        values[key] = of_reward.rewards
        unscored = scoring.unscored_rows(reward, rows, of_reward)
        summaries[key] = _summary(of_reward) | {"unscored": unscored}
    step_scores = [_step_scored(key, reward, rows, args.batch_size or 32) for key, reward in step_rewards.items()]
    # Rewards are compared with each other, and each with its logged value, which was rounded to float32.
    disagreements = scoring.disagreements(values, 1e-6)
    for key, before in logged.items():
        disagreements += scoring.disagreements({key: values[key], LOGGED + key: before}, 1e-4)
        values[LOGGED + key] = before
    step_summaries = _step_summaries(args, rows, scores, step_scores)
    return _Part(name, rows, scores, step_scores, values, disagreements, summaries, step_summaries)


# Input ---------------------------------------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> None:
    refuse_low_numbers(args, batch_size=1, show=0, limit=1)
    for field in FIELDS:
        rewards = getattr(args, field)
        if len(set(rewards)) < len(rewards):
            raise InputError(field, " ".join(rewards), "different rewards", "Name each once.")
    for reward in args.reward_funcs:
        if Path(reward).is_dir():
            remedy = f"A process reward model scores steps: --step_reward_funcs {reward}."
            raise InputError("reward_funcs", f"{reward}, a folder", "a reward of whole completions", remedy)
    if args.plot is not None:
        if Path(args.plot).suffix != ".png":
            raise InputError("plot", args.plot, "a file that ends in .png", "Rename it.")
        require_package("matplotlib", "plot", args.plot, "report")
    files = [args.data, *filter(None, [args.dataset])]
    for field in ("output", "plot", "pass_rates"):
        path = getattr(args, field)
        if path is not None:
            check_file(field, path, files)
            files.append(path)


def _specs(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the values of the recipe, and both kinds of rewards, each as it was written and as it was read: those of
    the call, else those of the recipe."""
    specs = {}
    for field in FIELDS:
        specs[field] = {text: reward_spec(text, field) for text in getattr(args, field)}
    # Rewards of the recipe do not come on top of those of the call.
    keys_in_use = () if any(specs.values()) else FIELDS
    recipe = brought_values(args, args.data, keys_in_use)
    for field in keys_in_use:
        specs[field] = {str(spec): spec for spec in recipe.get(field) or []}
    if not any(specs.values()):
        remedy = "Name some: --reward_funcs math_reward, or --step_reward_funcs runs/prm. "
        remedy += f"A run's folder may bring some that run code: {TRUST}."
        raise InputError("reward_funcs", "none", "a reward or a step reward", remedy)
    needed = {"plot": "step_reward_funcs", "pass_rates": "reward_funcs"}
    for field, kind in needed.items():
        value = getattr(args, field)
        if value is not None and not specs[kind]:
            raise InputError(field, value, f"none without {kind}", f"Add --{kind}, or remove it.")
    return recipe, specs


def _sources(path: str) -> dict[str, str]:
    """Return paths of the completions by the model that wrote them, the trained one last; one with an empty name where
    they are not the samples of an evaluation. One rate over a baseline and the trained model would be of neither."""
    path = _in_run(path)
    # Beside samples of an evaluation lies a note about their model.
    models = {}
    for file in Path(path).glob("*.jsonl"):
        models[file] = read_object(file.with_suffix(f".{KIND}.json"))
    if None in models.values() or len(models) < 2:
        return {"": path}
    # Which of them is a baseline is written in the results.
    roles = {}
    for evaluation in read_results(Path(path).parent):
        for model in evaluation["models"]:
            roles[model["name"], model.get("weights")] = model["role"]
    ranked = []
    names = []
    for file, model in models.items():
        role = roles.get((model.get("model"), model.get("weights")), "")
        name = f"{role}: {model.get('model')}".removeprefix(": ")
        names.append(name)
        # Baselines first, the trained model last, among their kind by age.
        ranked.append((role == "model", role != "baseline", file.stat().st_mtime, name, str(file)))
    sources = {}
    for *_, name, file in sorted(ranked):
        if names.count(name) > 1:
            name = f"{name} ({Path(file).name})"
        sources[name] = file
    return sources


def _read(args: argparse.Namespace, recipe: dict[str, Any], path: str) -> Rows:
    """Return the completions at a path, with the columns of the dataset, each row with every column."""
    is_recorded = Path(path, LOG_FOLDER).is_dir()
    rows = _recorded(Path(path)) if is_recorded else scoring.read_rows(path)
    rows = rows[: args.limit]
    # What a run has logged lacks the columns of its dataset.
    source = args.dataset
    if not source and _is_logged_table(rows):
        source = recipe.get("dataset_name")
    if source:
        dataset = prompt_rows({**recipe, "dataset_name": source})
        # Rows are joined by the prompt, of which a run log has the text alone.
        if is_recorded:
            prompts = {logged_prompt(row["prompt"]): row["prompt"] for row in dataset}
            for row in rows:
                row["prompt"] = prompts.get(row["prompt"], row["prompt"])
        rows = scoring.with_columns_of(rows, dataset)
    for old, new in checked_renamings(args.columns, dict.fromkeys(chain(*rows))):
        new_names = {old: new}
        for position, row in enumerate(rows):
            rows[position] = {new_names.get(name, name): value for name, value in row.items()}
    for number, row in enumerate(rows, start=1):
        if row.get("steps") is not None:
            _check_steps(row, f"data, row {number}")
            # `label-steps` writes steps alone.
            if row.get("completion") is None:
                row["completion"] = "\n".join(step.rstrip("\n") for step in row["steps"])
    scoring.check_completions(rows)
    # Lines of JSON may lack a key that others have.
    names = dict.fromkeys(chain(*rows))
    return [{name: row.get(name) for name in names} for row in rows]


def _is_logged_table(rows: Rows) -> bool:
    """Tell whether rows are those of TRL's table of completions."""
    return all(column in rows[0] for column in scoring.TABLE_COLUMNS)


def _check_steps(row: Row, field: str) -> None:
    steps = row["steps"]
    labels = row.get("labels")
    if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
        raise InputError(field, "steps of another form", "a list of texts", "Rename the column, or fix the row.")
    if labels is None:
        return
    is_list = isinstance(labels, list) and len(labels) == len(steps)
    if not is_list or any(label not in (True, False, None) for label in labels):
        expected = f"{len(steps)} labels, one per step: true, false or null"
        raise InputError(field, f"the labels {labels!r:.80}", expected, "Fix the row, or rename the column.")


def _in_run(path: str) -> str:
    """Return the completions of a run's folder: those that it logged, else the samples of its evaluations, else the
    folder itself, where the run log recorded some; any other path as it is."""
    run = Path(path)
    if not (run / LOG_FOLDER).is_dir():
        return path
    folders = {run / "completions": "*.parquet", run / EVALUATIONS / "samples": "*.jsonl"}
    for folder, pattern in folders.items():
        files = sorted(folder.glob(pattern))
        if files:
            console.log(f"Scoring the completions in {folder}: {', '.join(file.name for file in files)}")
            return str(folder)
    return path


def _recorded(run: Path) -> Rows:
    """Return the training groups of a run log, a row per completion as in TRL's table: without special tokens, with
    the columns that are recorded whole."""
    recorded = read_run(run).completions
    groups = []
    if isinstance(recorded, RecordedCompletions):
        groups = [group for group in recorded if group.mode == "train"]
    if not groups:
        remedy = f"Train with record_groups above 0, or sample some: `trl-drgrpo eval --model {run}`."
        raise InputError("data", f"{run}, a run that recorded no completions", "completions", remedy)
    console.log(f"Scoring {len(groups)} recorded groups of {run}: a part of what was trained on, see record_groups.")
    about = read_object(run / LOG_FOLDER / RUN) or {}
    # Without special tokens a pattern that matches nothing: a text never holds a NUL.
    special_tokens = about.get("special_tokens") or ["\0"]
    special = re.compile("|".join(map(re.escape, special_tokens)))
    rows = []
    for group in groups:
        # The log cuts long values: a gold answer that was cut would be another one.
        whole_columns = {name: value for name, value in group.columns.items() if len(value) < COLUMN_CHARACTERS}
        for row in group.rows:
            completion: Any = special.sub("", row.text)
            if about.get("prompts") == "messages":
                completion = [{"role": "assistant", "content": completion}]
            table = {"prompt": group.prompt, "completion": completion, "step": group.step, "advantage": row.advantage}
            rows.append({**whole_columns, **row.rewards, **table})
    return rows


def _resolved(specs: dict[str, dict[str, Any]], field: str, resolve: Callable[..., Callable]) -> dict[str, Callable]:
    """Return rewards by name; by what was written where two have one name."""
    rewards = {}
    for text, spec in specs[field].items():
        reward = resolve(spec, field)
        name = reward_name(reward)
        if name in rewards:
            name = text
        rewards[name] = reward
    return rewards


def _split_logged(rows: Rows, names: list[str]) -> tuple[Rows, dict[str, list[float | None]]]:
    """Return the rows without the columns that are of TRL's table alone, and the rewards logged in it."""
    if not _is_logged_table(rows):
        return rows, {}
    logged = {}
    for name in names:
        values = [row.get(name) for row in rows]
        # A column of the dataset may have the name of a reward, and hold texts.
        if name in rows[0] and all(isinstance(value, int | float | None) for value in values):
            # pandas writes NaN for None.
            logged[name] = [None if value is None or math.isnan(value) else float(value) for value in values]
    dropped = {*scoring.TABLE_COLUMNS, *logged}
    rows = [{name: value for name, value in row.items() if name not in dropped} for row in rows]
    return rows, logged


def _with_steps(rows: Rows, separator: str | Sequence[str]) -> Rows:
    """Return rows with the texts of their steps, each with the separator that ends it: the steps that they came with
    (published and labeled ones lack it), else those that a `step_separator` ends."""
    segmenter = segmenter_without_turns(separator)
    if isinstance(segmenter.rule, Interval) and any(row.get("steps") is None for row in rows):
        remedy = "Score rows with a column steps, or set another one."
        raise InputError("step_separator", repr(separator), "separators or a regex: only texts are saved", remedy)
    rows_with_steps = []
    for row in rows:
        steps = row.get("steps")
        if steps is None:
            steps = list(segmenter.of_text(completion_text(row["completion"])))
        else:
            # The last step ends with the completion, not with a separator.
            steps = [*map(segmenter.rule.with_end, steps[:-1]), *steps[-1:]]
        rows_with_steps.append({**row, "steps": steps})
    return rows_with_steps


def _check_reward(name: str, reward: Callable, rows: Rows, is_of_steps: bool) -> None:
    """Check that the reward is of its kind, and that its columns and programs are there."""
    needed = required(reward)
    # Step rewards declare this attribute, or ask for the steps.
    scores_steps = hasattr(reward, "is_causal") or "steps" in needed
    if scores_steps and not is_of_steps:
        remedy = "Name it under --step_reward_funcs."
        raise InputError(f"reward {name}", "a step reward", "one number per completion", remedy)
    if is_of_steps and "step_ends" in needed:
        expected = "one that reads texts: no tokens are saved"
        remedy = "Try it in a run of a few steps."
        raise InputError(f"reward {name}", "a step reward that reads the policy's tokens", expected, remedy)
    check_columns(reward, list(rows[0]), name, "Rename the column that holds it: `--columns <column>={}`")
    ask(reward, "check")
    if "completion_ids" in needed and rows[0].get("completion_ids") is None:
        expected = "a column completion_ids, which it reads"
        remedy = "Pass the model's tokenizer: --tokenizer <folder or Hub id>."
        raise InputError(f"reward {name}", "completions without token ids", expected, remedy)


def _scored(
    name: str,
    reward: Callable,
    rows: Rows,
    batch_size: int,
    validate: Callable | None = None,
) -> RewardScores:
    with console.progress_over(len(rows), 0, "rows") as show:
        return scoring.score_rows(reward, rows, name, batch_size, lambda done: show(name, done), validate)


def _step_scored(name: str, reward: Callable, rows: Rows, batch_size: int) -> RewardScores:
    """Score as [`_scored`] does, with a list of scores per row; all `None` where the call failed."""
    from trl_drgrpo.process_rewards.step_scorer import validate_step_rewards
    from trl_drgrpo.process_rewards.steps import Steps

    def validate(output: Any, batch: Sequence[Row]) -> list[Any]:
        steps_of_rows = []
        for row in batch:
            texts = tuple(row["steps"])
            # No tokens are saved. Steps count as ending at these places, of which only the number matters.
            steps_of_rows.append(Steps(texts, tuple(range(len(texts)))))
        return validate_step_rewards(output, steps_of_rows, name, "the rows")

    scores = _scored(name, reward, rows, batch_size, validate)
    for index, row in enumerate(rows):
        if scores.rewards[index] is None:
            scores.rewards[index] = [None] * len(row["steps"])
    return scores


def _summary(scores: RewardScores) -> dict[str, Any]:
    """Return the results of a reward, ready for JSON."""
    failures = []
    for row, reason in sorted(scores.failures.items()):
        failures.append({"row": row + 1, "reason": reason})
    return {**scores.summary(), "failures": failures}


def _step_summaries(
    args: argparse.Namespace, rows: Rows, scores: list[RewardScores], step_scores: list[RewardScores]
) -> dict[str, Any]:
    """Return the results of each step reward, and how well it tells good steps and completions from bad ones."""
    if not step_scores:
        return {}
    from trl_drgrpo.evaluation.steps import compared

    # Labels are 0 and 1 in some files.
    labels = []
    for row in rows:
        labels_of_row = row.get("labels")
        labels.append(labels_of_row and [label if label is None else bool(label) for label in labels_of_row])
    # Completions count as correct by the first reward, without one by a column.
    correct: Any
    if scores:
        correct = _judged(scores[0], args.correct_threshold)
        if correct is None:
            name = scores[0].name
            console.log(f"{name} gave other rewards than 0 and 1: set --correct_threshold to compare with it.")
            correct = [None] * len(rows)
    else:
        verdicts = [row.get("correct") for row in rows]
        correct = [verdict if isinstance(verdict, bool) else None for verdict in verdicts]
    prompts = [prompt_key(row["prompt"]) for row in rows]
    summaries = {}
    for of_reward in step_scores:
        comparison = compared(of_reward.rewards, labels, correct, prompts, args.step_threshold)
        summaries[of_reward.name] = _summary(of_reward) | comparison
    return summaries


def _judged(scores: RewardScores, threshold: float | None) -> list[bool | None] | None:
    rewards = [float("nan") if reward is None else reward for reward in scores.rewards]
    return CorrectnessRule([scores.name], threshold=threshold).judge(rewards)


# Output --------------------------------------------------------------------------------------------------------------


def _print_summaries(summaries: dict[str, Any], num_rows: int, show: int) -> None:
    """Print a table of all rewards, and per reward its failures and the rows to which it gave None."""
    table = [["reward", "rows", "mean", "std", "None", "failed", "ms/row", "slowest"]]
    metrics = []
    for name, summary in summaries.items():
        line = [
            name,
            str(summary["rows"]),
            _digits(summary["mean"], 4),
            _digits(summary["std"], 4),
            f"{summary['none_frac']:.1%}",
            str(summary["failed"]),
            f"{1e3 * summary['seconds_mean']:.2f}",
            f"{1e3 * summary['seconds_max']:.2f}",
        ]
        table.append(line)
        # Failures have a column of their own.
        for key, value in summary["metrics"].items():
            if "/failed_frac" not in key:
                metrics.append(f"  {key} {value:g}")
    print("\n".join([*console.aligned(table), *metrics]))
    for name, summary in summaries.items():
        failures = summary["failures"]
        if failures:
            print(f"\n{name} failed on {len(failures)} rows")
        for failure in failures[:show]:
            print(f"  row {failure['row']}: {scoring.one_line(failure['reason'], 200)}")
        unscored = summary.get("unscored")
        if unscored:
            print(f"\n{name} gave None to {len(unscored)} of {num_rows} rows, with these gold values:")
            for row in unscored[:show]:
                golds = ", ".join(f"{column} {value}" for column, value in row["columns"].items()) or "no column"
                if row["reason"]:
                    golds += f" ({scoring.one_line(row['reason'], 200)})"
                print(f"  row {row['row']}: {golds}")


def _print_disagreement(disagreement: Row, rows: Rows, values: dict[str, list], show: int) -> None:
    """Print the rows on which two rewards differ. `values`: the rewards by name."""
    first = disagreement["first"]
    second = disagreement["second"]
    print(f"\n{first} and {second} differ on {disagreement['count']} of {len(rows)} rows")
    for row in disagreement["rows"][:show]:
        numbers = []
        for name in (first, second):
            reward = values[name][row - 1]
            numbers.append("None" if reward is None else f"{reward:g}")
        # The end of the completion, where the answer is.
        text = completion_text(rows[row - 1]["completion"])[-400:]
        text = " ".join(text.split())
        if len(text) > 100:
            text = f"...{text[-97:]}"
        print(f"  row {row}: {' and '.join(numbers)}: {text}")


def _print_steps(scores: RewardScores, summary: dict[str, Any], rows: Rows, show: int) -> None:
    """Print how well a step reward tells good from bad, and the steps on which it is most wrong."""
    table = [[f"{scores.name} against", "count", "true", "AUC [95%]", "Brier", "ECE"]]
    for kind, numbers in summary["against"].items():
        auc = _digits(numbers["auc"])
        if numbers["auc_low"] is not None:
            auc += f" [{_digits(numbers['auc_low'])}, {_digits(numbers['auc_high'])}]"
        line = [
            kind,
            str(numbers["count"]),
            f"{numbers['true_frac']:.1%}",
            auc,
            _digits(numbers["brier"]),
            _digits(numbers["ece"]),
        ]
        table.append(line)
    if len(table) == 1:
        print(f"\n{scores.name}: no labels, and no reward or column `correct`, to compare it with")
        return
    print("\n" + "\n".join(console.aligned(table)))
    first = summary["first_error"]
    if first["incorrect"] + first["correct"]:
        incorrect = f"{_digits(first['incorrect_accuracy'])} of {first['incorrect']} incorrect"
        correct = f"{_digits(first['correct_accuracy'])} of {first['correct']} correct"
        result = f"{incorrect}, {correct} completions; F1 {_digits(first['f1'])}"
        print(f"first error (a score below {first['threshold']:g}): {result}")
    # The steps with the largest errors. Rows may be unlabeled.
    errors = []
    for row, scores_of_steps in enumerate(scores.rewards):
        labels = rows[row].get("labels") or ()
        for step, (score, label) in enumerate(zip(scores_of_steps, labels, strict=False)):
            if score is not None and label is not None:
                errors.append((abs(score - label), row, step, score, label))
    for _, row, step, score, label in sorted(errors, reverse=True)[:show]:
        verdict = "good" if label else "bad"
        text = scoring.one_line(rows[row]["steps"][step], 100)
        print(f"  row {row + 1}, step {step + 1}: {score:.3f}, labeled {verdict}: {text}")


def _digits(value: float | None, decimals: int = 3) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"


def _with_scores(part: _Part) -> Iterator[Row]:
    """Yield the rows as they are written to a file, each with its scores."""
    for index, row in enumerate(part.rows):
        rewards = {}
        seconds = {}
        failures = {}
        for scores in part.scores + part.step_scores:
            rewards[scores.name] = scores.rewards[index]
            seconds[scores.name] = round(scores.seconds[index], 6)
            if index in scores.failures:
                failures[scores.name] = scores.failures[index]
        written = dict(row)
        if part.name:
            written["data"] = part.name
        written |= {"scores": rewards, "seconds": seconds}
        if failures:
            written["failures"] = failures
        yield written
