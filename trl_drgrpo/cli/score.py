"""`trl-drgrpo score`: run reward functions over saved completions, before a run or on those that a run has logged.

The table goes to standard output; progress, tracebacks and what rewards print go to standard error. Exit codes: 0
done, 1 a reward failed on some row, 2 bad input.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from trl_drgrpo.cli import console
from trl_drgrpo.cli.data import write_rates
from trl_drgrpo.cli.run_keys import EVALUATIONS, LOG_FOLDER
from trl_drgrpo.cli.values import reward_spec
from trl_drgrpo.common.disk import check_file, write_whole
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.ranges import Range, refuse_outside, whole
from trl_drgrpo.features.diagnostics.correctness import CorrectnessRule
from trl_drgrpo.rewards.columns import check_columns, check_ready
from trl_drgrpo.rewards.contract import reward_name
from trl_drgrpo.rewards.recipe_rewards import resolve_reward
from trl_drgrpo.rewards.sample import completion_text
from trl_drgrpo.rewards.scoring import (
    TABLE_COLUMNS,
    check_completions,
    disagreements,
    read_rows,
    renamed,
    score_rows,
    unscored_rows,
    with_columns_of,
)
from trl_drgrpo.rewards.signatures import required

LOGGED = "logged "  # in front of the name of a reward whose value is in the file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options to a parser."""
    parser.description = (
        "Score saved completions and show, for each reward, mean, spread, failures, share of None and time, the "
        "slowest rows, and the rows on which two rewards (or a reward and its logged value) differ."
    )
    add = parser.add_argument
    rewards = "names, file.py:f or {name: {option: value}}"
    add("--reward_funcs", "--rewards", dest="rewards", required=True, nargs="+", metavar="REWARD", help=rewards)
    add(
        "--data",
        required=True,
        help="completions: .jsonl, .parquet (as log_completions writes them), a folder of such files, or a run",
    )
    add(
        "--dataset_name",
        "--dataset",
        dest="dataset",
        help="file with prompt and the columns that --data lacks, joined by the prompt",
    )
    add("--columns", nargs="+", default=[], metavar="OLD=NEW", help="rename columns, for example answer=solution")
    add("--tokenizer", help="folder or Hub id, for rewards that read completion_ids")
    add("--limit", type=int, help="score only the first rows")
    add("--batch_size", type=int, default=1, help="rows per call; 1 reports time and failure per row (default: 1)")
    add("--show", type=int, default=5, help="rows per list (default: 5)")
    add("--tolerance", type=float, default=1e-6, help="two rewards differ beyond this (default: 1e-6)")
    add("--output", help="JSON Lines file to write: each row with its scores")
    add(
        "--pass_rates",
        metavar="FILE",
        help="JSON Lines file to write: the pass rate of each prompt by the first reward, for prior_pass_rates",
    )
    add(
        "--correct_threshold",
        type=float,
        help="a completion passes if the first reward is at least this; needed unless its rewards are 0 and 1",
    )
    add("--json", action="store_true", help="print the results as JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """Score and print; 1 where a reward failed on some row."""
    _check(args)
    specs = [reward_spec(spec, "reward_funcs") for spec in args.rewards]
    rows = _read(args)  # before anything heavy is imported
    with console.stdout_to_stderr():
        rewards = _resolved(args.rewards, specs)
        rows, logged = _split_logged(rows, list(rewards))
        rows = _tokenized(args.tokenizer, rows)
        for name, reward in rewards.items():
            _check_reward(name, reward, rows)
        scores = [_scored(name, reward, rows, args.batch_size) for name, reward in rewards.items()]
        unscored = {each.name: unscored_rows(rewards[each.name], rows, each) for each in scores}
    for each in scores:
        if each.traceback:
            console.log(f"{each.name}, its first failure:\n{each.traceback.rstrip()}")
    values = {each.name: each.rewards for each in scores}
    pairs = disagreements(values, args.tolerance)
    for name, before in logged.items():  # a log holds float32
        pairs += disagreements({name: values[name], LOGGED + name: before}, max(args.tolerance, 1e-4))
    values |= {LOGGED + name: before for name, before in logged.items()}
    if args.output is not None:
        _write(args.output, rows, scores)
    if args.json:
        json.dump(_as_json(scores, unscored, pairs, args.show), sys.stdout, indent=2)
        print()
    else:
        _print_tables(scores, unscored, pairs, rows, values, args.show)
    if args.pass_rates is not None:
        _write_pass_rates(args.pass_rates, args.correct_threshold, rows, scores[0])
    return int(any(each.num_failed for each in scores))


# Input ---------------------------------------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> None:
    for field, least in (("batch_size", 1), ("show", 0), ("limit", 1)):
        refuse_outside(field, getattr(args, field), whole(least, optional=True, remedy="Give a larger number."))
    refuse_outside("tolerance", args.tolerance, Range(0, remedy="0 shows every difference."))
    if args.correct_threshold is not None and args.pass_rates is None:
        remedy = "It is for pass rates only: add --pass_rates, or remove it."
        raise InputError("correct_threshold", str(args.correct_threshold), "none without --pass_rates", remedy)
    if len(set(args.rewards)) < len(args.rewards):
        raise InputError("reward_funcs", " ".join(args.rewards), "different rewards", "Name each once.")
    inputs = [args.data, *map(str, Path(args.data).glob("*.jsonl")), *filter(None, [args.dataset])]
    for field in ("output", "pass_rates"):
        if (path := getattr(args, field)) is not None:
            check_file(field, path, inputs)


def _read(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = read_rows(_in_run(args.data))[: args.limit]
    if args.dataset:
        rows = with_columns_of(rows, read_rows(args.dataset, "dataset"))
    rows = renamed(rows, args.columns)
    check_completions(rows)
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def _in_run(path: str) -> str:
    """The completions of a run's folder: those that it logged, else the samples of its evaluations; any other path as
    it is."""
    run = Path(path)
    if not (run / LOG_FOLDER).is_dir():
        return path
    folders = {run / "completions": "*.parquet", run / EVALUATIONS / "samples": "*.jsonl"}
    for folder, pattern in folders.items():
        if files := sorted(folder.glob(pattern)):
            console.log(f"Scoring the completions in {folder}: {', '.join(each.name for each in files)}")
            return str(folder)
    remedy = f"Train with log_completions: true, or sample some: `trl-drgrpo eval --model {path}`."
    raise InputError("data", f"{path}, a run that kept no whole completions", "completions", remedy)


def _resolved(texts: list[str], specs: list[Any]) -> dict[str, Any]:
    """Rewards by name; by what was written where two have one name."""
    rewards: dict[str, Any] = {}
    for text, spec in zip(texts, specs, strict=True):
        reward = resolve_reward(spec, "reward_funcs")
        name = reward_name(reward)
        rewards[text if name in rewards else name] = reward
    return rewards


def _split_logged(rows: list[dict[str, Any]], names: list[str]) -> tuple[list[dict[str, Any]], dict[str, list]]:
    """The rows without the columns of TRL's table that are none of the dataset, and the rewards logged in it."""
    if not all(column in rows[0] for column in TABLE_COLUMNS):
        return rows, {}
    logged: dict[str, list] = {}
    for name in names:
        values = [row.get(name) for row in rows]
        if name in rows[0] and all(value is None or isinstance(value, (int, float)) for value in values):
            logged[name] = [None if value is None or value != value else float(value) for value in values]
    dropped = {*TABLE_COLUMNS, *logged}
    return [{name: value for name, value in row.items() if name not in dropped} for row in rows], logged


def _tokenized(tokenizer_name: str | None, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if tokenizer_name is None:
        return rows
    from trl_drgrpo.process_rewards.loading import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_name, None)
    texts = [completion_text(row["completion"]) for row in rows]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return [{**row, "completion_ids": each} for row, each in zip(rows, ids, strict=True)]


def _check_reward(name: str, reward: Any, rows: list[dict[str, Any]]) -> None:
    """Checks that the reward's columns and programs are there."""
    check_columns(reward, list(rows[0]), name, "Rename the column that holds it: `--columns <column>={}`")
    check_ready(reward)
    if "completion_ids" in required(reward) and rows[0].get("completion_ids") is None:
        got, expected = "completions without token ids", "a column completion_ids, which it reads"
        raise InputError(
            f"reward {name}", got, expected, "Pass the model's tokenizer: --tokenizer <folder or Hub id>."
        )


def _scored(name: str, reward: Any, rows: list[dict[str, Any]], batch_size: int) -> Any:
    with console.progress_over(len(rows), 0, "scoring", "rows") as show:
        return score_rows(reward, rows, name, batch_size, lambda done: show(name, done))


# Output --------------------------------------------------------------------------------------------------------------


def _as_json(scores: list[Any], unscored: dict[str, list], pairs: list[Any], show: int) -> dict[str, Any]:
    rewards = {}
    for each in scores:
        rewards[each.name] = {
            **each.summary(),
            "slowest": [{"row": row + 1, "seconds": each.seconds[row]} for row in each.slowest(show)],
            "failures": [{"row": row + 1, "reason": reason} for row, reason in sorted(each.failures.items())],
            "unscored": [
                {"row": one.row + 1, "reason": one.reason, "columns": {k: _gold(v) for k, v in one.columns.items()}}
                for one in unscored[each.name]
            ],
        }
    disagreements = [
        {"first": pair.first, "second": pair.second, "count": len(pair.rows), "rows": [row + 1 for row in pair.rows]}
        for pair in pairs
    ]
    return {"rewards": rewards, "disagreements": disagreements}


def _print_tables(
    scores: list[Any], unscored: dict[str, list], pairs: list[Any], rows: list, values: dict[str, list], show: int
) -> None:
    """Prints the results, each list to `show` rows. `values`: by reward, those that the file had already included."""
    lines: list[tuple[str, ...]] = [("reward", "rows", "mean", "std", "None", "failed", "ms/row", "slowest")]
    metrics = []
    for each in scores:
        found = each.summary()
        numbers = ["-" if found[name] is None else f"{found[name]:.4f}" for name in ("mean", "std")]
        times = [f"{1e3 * found[name]:.2f}" for name in ("seconds_mean", "seconds_max")]
        lines.append(
            (each.name, str(found["rows"]), *numbers, f"{found['none_frac']:.1%}", str(found["failed"]), *times)
        )
        # Failures have a column of their own.
        metrics += [f"  {name} {value:g}" for name, value in found["metrics"].items() if "/failed_frac" not in name]
    print("\n".join([*console.aligned(lines), *metrics]))
    for each in scores:
        if each.failures:
            print(f"\n{each.name} failed on {len(each.failures)} rows")
        for row, reason in sorted(each.failures.items())[:show]:
            print(f"  row {row + 1}: {_line(reason, 200)}")
        if missing := unscored[each.name]:
            print(f"\n{each.name} gave None to {len(missing)} of {len(rows)} rows, with these gold values:")
        for one in missing[:show]:
            golds = ", ".join(f"{column} {_gold(value)}" for column, value in one.columns.items())
            reason = f" ({_line(one.reason, 200)})" if one.reason else ""
            print(f"  row {one.row + 1}: {golds or 'no column'}{reason}")
        if show:
            slowest = ", ".join(f"{row + 1} ({1e3 * each.seconds[row]:.1f} ms)" for row in each.slowest(show))
            print(f"\n{each.name}, slowest rows: {slowest}")
    for pair in pairs:
        print(f"\n{pair.first} and {pair.second} differ on {len(pair.rows)} of {len(rows)} rows")
        for row in pair.rows[:show]:
            one, two = (values[name][row] for name in (pair.first, pair.second))
            print(f"  row {row + 1}: {_value(one)} and {_value(two)}: {_ending(rows[row])}")


def _value(value: float | None) -> str:
    return "None" if value is None else f"{value:g}"


def _line(text: str, longest: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= longest else text[: longest - 3] + "..."


def _gold(value: Any) -> str:
    """A gold answer, tests or the like, as one short line."""
    return _line(value if isinstance(value, str) and value.strip() else repr(value), 80)


def _ending(row: dict[str, Any]) -> str:
    """The end of a completion, where its answer is, as one line."""
    text = " ".join(completion_text(row["completion"])[-400:].split())
    return text if len(text) <= 100 else "..." + text[-97:]


def _write(path: str, rows: list[dict[str, Any]], scores: list[Any]) -> None:
    lines = []
    for index, row in enumerate(rows):
        given = {each.name: each.rewards[index] for each in scores}
        failed = {each.name: each.failures[index] for each in scores if index in each.failures}
        seconds = {each.name: round(each.seconds[index], 6) for each in scores}
        line = {**row, "scores": given, "seconds": seconds, **({"failures": failed} if failed else {})}
        lines.append(json.dumps(line, ensure_ascii=False, default=str) + "\n")
    write_whole(Path(path), "".join(lines))


def _write_pass_rates(path: str, threshold: float | None, rows: list[dict[str, Any]], scores: Any) -> None:
    """The last thing that is done: the scores exist even if the reward has problems."""
    rewards = [float("nan") if reward is None else reward for reward in scores.rewards]
    correct = CorrectnessRule([scores.name], threshold=threshold).judge(rewards)
    if correct is None:
        remedy = "Set the lowest reward that passes: --correct_threshold."
        raise InputError("pass_rates", f"rewards of {scores.name} other than 0 and 1", "pass or fail", remedy)
    write_rates(path, rows, correct, f" by {scores.name}")
