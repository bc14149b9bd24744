"""Recorded groups and key curves for wandb and trackio, where `report_to` names them.

Every metric reaches them through transformers. TRL's `log_completions` sends the newest batch as a table of its own;
with it there is no second one. A tracker that fails costs its table or picture, never the run.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from trl_drgrpo.features.diagnostics.run_log import FOLDER
from trl_drgrpo.features.model_card.card import draw_curves
from trl_drgrpo.upstream.description import DescribingFeature

TRACKERS = ("wandb", "trackio")
GROUPS, CURVES = "drgrpo/groups", "drgrpo/curves"  # under these names
PANELS = (
    ("mean reward", ("reward", "eval_reward")),
    ("pass rate", ("drgrpo/pass_rate", "eval_drgrpo/pass_rate")),
    ("mean length (tokens)", ("completions/length_correct_mean", "completions/length_incorrect_mean")),
    ("groups without a signal", ("drgrpo/zero_signal_frac",)),
)


class Trackers(DescribingFeature):
    """Sends the table at each log that has new groups, and the picture when training ends."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        diagnostics = self.trainer.diagnostics
        groups, diagnostics.newest_groups = diagnostics.newest_groups, []
        if groups and not args.log_completions:
            columns, rows = group_table(groups)
            self._send(args, state, GROUPS, lambda tracker: tracker.Table(columns=columns, data=rows))
        if "train_runtime" in (logs or {}):  # the summary: trackio is closed before the event after it
            picture = Path(str(args.output_dir)) / FOLDER / "curves.png"
            if any(name in args.report_to for name in TRACKERS) and draw_curves(state.log_history, picture, PANELS):
                self._send(args, state, CURVES, lambda tracker: tracker.Image(str(picture)))

    def _send(self, args: Any, state: Any, name: str, make: Callable[[Any], Any]) -> None:
        for tracker_name in TRACKERS:
            if tracker_name in args.report_to:
                with self.describing(f"{name} for {tracker_name}"):
                    tracker = import_module(tracker_name)
                    tracker.log({name: make(tracker), "train/global_step": state.global_step})


def group_table(groups: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Recorded groups as columns and rows, a row per completion.

    Args:
        groups (`Sequence[dict]`): As in `completions.jsonl`.

    Returns:
        `tuple[list[str], list[list]]`: The names of the columns; one value each per row.
    """
    rewards = list(dict.fromkeys(name for group in groups for row in group["rows"] for name in row["rewards"]))
    per_func = [f"rewards/{name}" for name in rewards]
    columns = ["step", "mode", "group", "prompt", "completion", *per_func, "reward", "baseline", "advantage"]
    rows = [
        [
            *(group[name] for name in ("step", "mode", "group", "prompt")),
            "".join(span["text"] for span in row["spans"]),
            *(row["rewards"].get(name) for name in rewards),
            *(row["reward"], group["baseline"], row["advantage"]),
            *(row["right"], row["truncated"], row["length"]),
        ]
        for group in groups
        for row in group["rows"]
    ]
    return [*columns, "correct", "truncated", "length"], rows
