"""The report as Markdown: tables of final numbers, settings and warnings, and the plots as a picture beside it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trl_drgrpo.report.page import amount, shown, visible

_COMPLETION_CHARACTERS = 300


def markdown_page(contents: dict[str, Any], plot: Path | None) -> str:
    """Renders the Markdown file. `contents`: of `report_contents`; `plot`: the picture in the same folder, `None`
    without matplotlib."""
    runs = contents["runs"]
    names = [_cell(run["name"]) for run in runs]
    parts = [f"# Run report: {', '.join(names)}", ""]
    for name, run in zip(names, runs, strict=True):
        parts += [f"- **{name}** ({run['kind']}): {_cell(run['status'])}", *(f"  - {_cell(n)}" for n in run["notes"])]
    if plot is not None:
        parts += ["", f"![curves](<{plot.name}>)"]
    parts += ["", "## Numbers", "", "Means over the first and the last tenth of what was logged.", ""]
    parts += _table(["metric", *names], [_final_row(row) for row in contents["final_table"]])
    parts += ["", "## Settings", ""]
    fields = [[row["name"] + " (differs)" * row["differs"], *row["values"]] for row in contents["settings_table"]]
    parts += _table(["field", *names], fields)
    parts += ["", "## Warnings", ""]
    warnings = [[run["name"], w["step"], w["cause"], w["message"]] for run in runs for w in run["warnings"]]
    parts += _table(["run", "step", "cause", "message"], warnings) if warnings else ["None."]
    for name, run in zip(names, runs, strict=True):
        for each in run["evaluations"]:
            parts += ["", f"## Evaluation of {name}, {_cell(each['date'])}", "", _cell(each["title"]), ""]
            parts += [*_table(each["head"], each["rows"]), "", *(f"- {_cell(note)}" for note in each["notes"])]
    parts += ["", "## Newest completions", ""]
    for name, run in zip(names, runs, strict=True):
        parts += _newest(name, run)
    return "\n".join(parts) + "\n"


def _final_row(row: dict[str, Any]) -> list[str]:
    pairs = zip(row["first"], row["last"], strict=True)
    share = row["share"]
    values = [f"{amount(a, share)} → {amount(b, share)}" if a is not None else amount(a, share) for a, b in pairs]
    return [f"{row['name']} ({row['unit']})" if row["unit"] else row["name"], *values]


def _newest(name: str, run: dict[str, Any]) -> list[str]:
    """The last group that is there, as a table; one that forks as a list of its stretches, branches indented."""
    if not run["groups"]:
        return [f"{name}: none recorded."]
    group = run["groups"][-1]
    shown_of = f"{run['rows_total']} completions recorded"
    head = f"{name}, step {group['step']} ({shown_of}): {_cell(group['prompt'][:_COMPLETION_CHARACTERS])}"
    if "tree" in group:
        return [head, "", *_tree(group["rows"], group["tree"], ""), ""]
    rows = []
    for row in group["rows"]:
        text = _beginning(row["spans"], row["cut"])
        rows.append([row["reward"], row["advantage"], row["zscore"], row["length"], text])
    return [head, "", *_table(["reward", "advantage", "GRPO's z-score", "tokens", "completion"], rows), ""]


def _beginning(spans: list[dict[str, Any]], cut: int = 0) -> str:
    text = "".join(span["text"] for span in spans)
    return f"{text[:_COMPLETION_CHARACTERS]} [...]" if len(text) + cut > _COMPLETION_CHARACTERS else text


def _tree(rows: list[dict[str, Any]], nodes: list[dict[str, Any]], prefix: str) -> Iterator[str]:
    """Nodes of a forked group (`fork_tree`) as items of a list."""
    for number, node in enumerate(nodes, start=1):
        (first, end), place = node["rows"], f"{prefix}{number}"
        if node["branches"]:
            title = f"{'Branch' if node['level'] else 'Parent'} {place}"
        else:
            title = f"Completion {first + 1}" + f", not cut (x {end - first})" * (end - first > 1)
        is_one_reward = all(row["reward"] == rows[first]["reward"] for row in rows[first:end])
        reward = f"{'reward' if is_one_reward else 'mean reward'} {shown(node['reward'])}"
        advantage = " to ".join(dict.fromkeys(shown(value) for value in node["advantages"])) or shown(None)
        spans = [span for span in rows[node["shown"]]["spans"] if span.get("level", 0) == node["level"]]
        indent = "  " * node["level"]
        yield f"{indent}- **{title}**: {reward}, advantage {advantage}: {_cell(_beginning(spans))}"
        yield from _tree(rows, node["branches"], f"{place}.")


def _table(head: list[str], rows: list[list[Any]]) -> list[str]:
    lines = [head, ["---"] * len(head), *[[_cell(shown(value)) for value in row] for row in rows]]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _cell(value: str) -> str:
    """Text that is neither markup nor the end of a table's cell."""
    text = visible(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for character in "\\`*_[]|$":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())
