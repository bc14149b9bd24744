"""`trl-drgrpo label-steps`: label the steps of a model's completions by rollouts and a verifier.

For each prompt sample completions, split them into steps and roll out from the end of every step: a step is labeled
good if at least one rollout is accepted by the outcome reward. Writes prompt, steps, labels and values as JSON Lines,
for `trl-drgrpo train-prm`. Run it again to continue.

The file that is written is what `trl-drgrpo train-prm --data` reads. A summary goes to standard output, progress to
standard error. Exit codes: 0 done, 2 bad input.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

from trl_drgrpo.cli import console, data
from trl_drgrpo.cli.batch import completed_rows, facts_of, prompt_rows
from trl_drgrpo.cli.job import model_path
from trl_drgrpo.cli.values import named_reward
from trl_drgrpo.common.disk import check_file
from trl_drgrpo.common.hub_errors import check_local
from trl_drgrpo.common.ranges import refuse_out_of_range, refuse_outside, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options to a parser."""
    console.add_model(parser, "folder or Hub id of the causal language model for rollouts", required=True)
    add = parser.add_argument
    prompts = "prompts: Hub id, folder, file, or reasoning_gym:<task>, as in train, with the columns the reward needs"
    add("--dataset_name", "--data", dest="data", required=True, help=prompts)
    add("--dataset_train_split", default="train", help="split with the prompts (default: train)")
    reward = "outcome reward: a name, package.module.f, file.py:f or {name: {option: value}}"
    add("--reward_funcs", "--reward", dest="reward", required=True, help=reward)
    add("--output", required=True, help="JSON Lines file to write")
    add("--rollouts", type=int, default=8, help="rollouts per step (default: 8)")
    add("--completions", type=int, default=1, help="completions per prompt (default: 1)")
    add("--step_separator", default="\\n", help=r"a step ends after it; \n is a line break (default: \n)")
    add("--max_new_tokens", type=int, default=512, help="longest continuation (default: 512)")
    add("--temperature", type=float, default=1.0, help="sampling temperature (default: 1)")
    add("--batch_size", type=int, default=32, help="continuations per forward pass (default: 32)")
    add("--seed", type=int, default=0, help="sampling seed (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Label and write."""
    refuse_out_of_range(vars(args))
    for field in ("rollouts", "completions", "max_new_tokens", "batch_size"):
        refuse_outside(field, getattr(args, field), whole(1, remedy="Give a positive number."))
    check_file("output", args.output, [args.data])
    check_local("model_name_or_path", model_path(args.model))
    data.check_source(args.data)
    with console.stdout_to_stderr():
        reward = named_reward(args.reward, "reward_funcs")
        split = data.load_data(args.data, split=args.dataset_train_split)
        rows = prompt_rows(split, args.data, [(args.reward, reward, ())])
        more, facts = partial(_labeled, args, rows, reward), facts_of(args, rows)
        labeled = completed_rows(args.output, "labeling", facts, len(rows), _GROUP, "prompts", more, _good)
    steps = [label for row in labeled for label in row["labels"] if label is not None]
    correct = sum(row["values"][-1] == 1.0 for row in labeled)
    fractions = {"good_frac": sum(steps) / max(len(steps), 1), "correct_frac": correct / max(len(labeled), 1)}
    console.print_numbers({"rows": len(labeled), "steps": len(steps), **fractions}, output=args.output)
    return 0


_GROUP = 32  # prompts whose completions are rolled out together, with seeds of their own


def _labeled(
    args: argparse.Namespace, rows: list[dict[str, Any]], reward: Any, first: int
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The labeled rows of the prompts from one on, group by group."""
    from trl_drgrpo.process_rewards.loading import load_model, load_tokenizer
    from trl_drgrpo.process_rewards.monte_carlo import TransformersRollouts, label_steps

    model = model_path(args.model)
    tokenizer = load_tokenizer(model, None)
    sampling = {name: getattr(args, name) for name in ("max_new_tokens", "temperature", "batch_size", "seed")}
    generate = TransformersRollouts(load_model(model, "AutoModelForCausalLM"), tokenizer, **sampling)
    options = {"rollouts": args.rollouts, "completions": args.completions}
    options["separator"] = args.step_separator.replace("\\n", "\n")
    given = [{name: value for name, value in row.items() if name != "steps" or value} for row in rows]
    for start in range(first, len(rows), _GROUP):
        generate.calls = 2 * start // _GROUP  # a group samples completions, then rollouts
        group = given[start : start + _GROUP]
        yield start + len(group), list(label_steps(group, generate, reward, tokenizer, **options))


def _good(labeled: list[dict[str, Any]]) -> str:
    labels = [label for row in labeled for label in row["labels"] if label is not None]
    return f"{sum(labels)} of the last {len(labels)} steps are good"
