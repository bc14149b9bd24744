"""The two forms in which `trl-drgrpo score` prints its results: tables for humans, JSON for programs."""

import json
import sys
from typing import Any

LOGGED = "logged "  # in front of the name of a reward whose value is in the file


def print_json(scores: list[Any], unscored: dict[str, list], pairs: list[Any], show: int) -> None:
    """Prints the results as JSON, with the `show` slowest rows."""
    report = {
        "rewards": {
            each.name: {
                **each.summary(),
                "slowest": [{"row": row + 1, "seconds": each.seconds[row]} for row in each.slowest(show)],
                "failures": [{"row": row + 1, "reason": reason} for row, reason in sorted(each.failures.items())],
                "unscored": [
                    {
                        "row": one.row + 1,
                        "reason": one.reason,
                        "columns": {k: _gold(v) for k, v in one.columns.items()},
                    }
                    for one in unscored[each.name]
                ],
            }
            for each in scores
        },
        "disagreements": [
            {"first": pair.first, "second": pair.second, "count": len(pair.rows), "rows": [r + 1 for r in pair.rows]}
            for pair in pairs
        ],
    }
    json.dump(report, sys.stdout, indent=2)
    print()


def print_tables(
    scores: list[Any], unscored: dict[str, list], pairs: list[Any], rows: list, logged: dict[str, list], show: int
) -> None:
    """Prints the results as tables of `show` rows. `logged`: values that the file had already, by reward."""
    width = max(len("reward"), *(len(each.name) for each in scores))
    print(
        f"{'reward':{width}} {'rows':>6} {'mean':>8} {'std':>8} {'None':>7} {'failed':>6} {'ms/row':>9} {'slowest':>9}"
    )
    for each in scores:
        found = each.summary()
        print(
            f"{each.name:{width}} {found['rows']:6} {_number(found['mean'])} {_number(found['std'])} "
            f"{found['none_frac']:7.1%} {found['failed']:6} {1e3 * found['seconds_mean']:9.2f} "
            f"{1e3 * found['seconds_max']:9.2f}"
        )
    for each in scores:
        for metric, value in each.summary()["metrics"].items():
            if not metric.endswith("/failed_frac"):  # has a column of its own
                print(f"  {metric} {value:g}")
    for each in scores:
        if each.failures:
            print(f"\n{each.name} failed on {len(each.failures)} rows")
        for row, reason in sorted(each.failures.items())[:show]:
            print(f"  row {row + 1}: {_line(reason)}")
        if missing := unscored[each.name]:
            print(f"\n{each.name} gave None to {len(missing)} of {len(rows)} rows, with these gold values:")
        for one in missing[:show]:
            golds = ", ".join(f"{column} {_gold(value)}" for column, value in one.columns.items())
            print(f"  row {one.row + 1}: {golds or 'no column'}{f' ({_line(one.reason)})' if one.reason else ''}")
        if show:
            slowest = ", ".join(f"{row + 1} ({1e3 * each.seconds[row]:.1f} ms)" for row in each.slowest(show))
            print(f"\n{each.name}, slowest rows: {slowest}")
    values = {each.name: each.rewards for each in scores} | {LOGGED + name: given for name, given in logged.items()}
    for pair in pairs:
        print(f"\n{pair.first} and {pair.second} differ on {len(pair.rows)} of {len(rows)} rows")
        for row in pair.rows[:show]:
            one, two = values[pair.first][row], values[pair.second][row]
            print(f"  row {row + 1}: {_value(one)} and {_value(two)}: {_ending(rows[row])}")


def _number(value: float | None) -> str:
    return f"{'-':>8}" if value is None else f"{value:8.4f}"


def _value(value: float | None) -> str:
    return "None" if value is None else f"{value:g}"


def _line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 200 else text[:197] + "..."


def _gold(value: Any) -> str:
    """A gold answer, tests or the like, as one short line."""
    text = " ".join(value.split()) if isinstance(value, str) and value.strip() else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _ending(row: dict[str, Any]) -> str:
    """The end of a completion, where its answer is, as one line."""
    from trl_drgrpo.rewards.text import completion_text

    text = " ".join(completion_text(row["completion"])[-400:].split())
    return text if len(text) <= 100 else "..." + text[-97:]
