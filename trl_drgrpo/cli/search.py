"""`trl-drgrpo search`: trajectories of a model, found with a verifier or a process reward model, as training data.

Search completions of each prompt within a budget of sampled tokens, and write them with steps, values, visit counts
and outcomes: for `train-prm`, `score` and, with --sft_output, SFT with TRL. For supervised training only: in GRPO
groups such completions bias the gradient. Run it again to continue.

The rows go to `--output`, a summary to standard output, progress to standard error. Exit codes: 0 done, 2 bad input or
a reward that failed.
"""

import argparse
import os
from collections.abc import Iterator
from dataclasses import asdict, fields
from functools import partial
from typing import Any

from trl_drgrpo.cli import console
from trl_drgrpo.cli.batch import Row, completed_rows, facts_of, prompt_rows, refuse_low_numbers, write_rows
from trl_drgrpo.cli.recipe import reward_spec
from trl_drgrpo.cli.run_keys import ANSWER_KEYS, CallSettings, add_keys, check_model_name, model_path, read_settings
from trl_drgrpo.common.disk import check_file
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.hub_errors import is_adapter
from trl_drgrpo.common.ranges import positive, refuse_outside
from trl_drgrpo.common.rows import check_prompt_rows
from trl_drgrpo.features.diagnostics.statistics import CorrectnessRule
from trl_drgrpo.process_rewards.named import step_reward
from trl_drgrpo.process_rewards.steps import DEFAULT_SEPARATOR, StepSegmenter
from trl_drgrpo.process_rewards.steps.segmenter import segmenter_without_turns
from trl_drgrpo.rewards.contract import reward_name
from trl_drgrpo.rewards.recipe_rewards import resolve_reward

_DATA = "Hub id, folder, file, or reasoning_gym:<task>, as in train"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options to a parser."""
    add = parser.add_argument
    with_default = partial(console.add_default, parser)
    console.add_model(parser, "folder or Hub id of the causal language model", required=True)
    add("--dataset_name", required=True, help=f"prompts: {_DATA}")
    add("--strategy", required=True, help="best_of_n, beam (over steps) or puct (over steps)")
    add("--budget_tokens", type=int, required=True, help="maximum sampled tokens per problem, kept or not")
    add("--output", type=os.path.expanduser, required=True, help="JSON Lines file to write, one row per completion")
    add(
        "--sft_output",
        type=os.path.expanduser,
        help="JSON Lines file for SFT: prompt and completion of correct completions",
    )
    add("--reward_funcs", help="verifier: a name, file.py:f or {name: {option: value}}; guides without --prm")
    add("--prm", help="folder of a process reward model, or a step reward function (name, path, mapping); guides")
    with_default("--path_value", "min", "value of a path: min, product or last of its step scores")
    with_default("--width", 4, "beams")
    with_default("--children", 4, "continuations sampled from a step")
    with_default("--exploration", 1.0, "c of PUCT")
    with_default("--accept_above", 0.5, "a completion is correct above this reward")
    add("--on_reward_error", default="raise", help="raise (stop, keep finished problems) or unscorable")
    add("--step_separator", default=DEFAULT_SEPARATOR, help=r"as in train (default: \n\n, an empty line)")
    with_default("--max_completion_length", 512, "longest completion in tokens")
    with_default("--temperature", 1.0, "sampling temperature")
    with_default("--top_p", 1.0, "nucleus sampling")
    with_default("--seed", 0, "sampling seed")
    with_default("--batch_size", 32, "continuations per forward pass, or requests at a time")
    with_default("--problems_at_once", 8, "problems searched together")
    add("--vllm_server_base_url", help="sample with a vLLM server of --model, or of its base: http://localhost:8000")
    with_default("--dataset_train_split", "train", "split with the prompts")
    add("--dataset_config", help="configuration of a Hub dataset")
    add("--rename_columns", nargs="+", default=[], metavar="OLD=NEW", help="for example question=prompt")
    add("--prompt_template", help="r1, qwen_math or a text with {prompt}, for base models")
    add("--system_prompt", help="message before every prompt")
    add("--limit", type=int, help="search only the first prompts")


def run(args: argparse.Namespace) -> int:
    """Search, write and sum up."""
    from trl_drgrpo.search.problem import SearchSettings, check_values

    # What the flags alone can get wrong, before anything heavy is imported.
    refuse_low_numbers(args, limit=1)
    settings = {field.name: getattr(args, field.name) for field in fields(SearchSettings)}
    SearchSettings(**settings)
    check_values(args.reward_funcs, args.prm)
    # A server has the base of an adapter; here it would have to be found.
    if args.vllm_server_base_url is None or not is_adapter(args.model):
        check_model_name(args.model, "model")
    check_file("output", args.output, [args.dataset_name], streams=False)
    if args.sft_output:
        if not args.reward_funcs:
            expected = "a verifier that says what is correct"
            remedy = "Leave it out, or name a verifier."
            raise InputError("sft_output", "a file without reward_funcs", expected, remedy)
        check_file("sft_output", args.sft_output, [args.output, args.dataset_name])
    from trl_drgrpo.search.collecting import OWN_COLUMNS, collect, sft_rows, summary

    with console.stdout_to_stderr():
        # Name, function and columns beside the dataset's, of each reward.
        rewards = []
        verifier = prm = None
        if args.reward_funcs:
            verifier = resolve_reward(reward_spec(args.reward_funcs, "reward_funcs"), "reward_funcs")
            rewards.append((args.reward_funcs, verifier, ()))
        if args.prm:
            prm = step_reward(reward_spec(args.prm, "prm"), "prm")
            rewards.append((args.prm, prm, ("steps", "step_ends")))
        rows = prompt_rows(vars(args), rewards, limit=args.limit)
        check_prompt_rows(rows, "dataset_name", OWN_COLUMNS)
        # The completion that the strategy picks, of each problem so far.
        selected = []

        def status(of_problem: list[Row]) -> str:
            selected.extend(row for row in of_problem if row["selected"])
            correct = sum(bool(row["correct"]) for row in selected) / len(selected)
            tokens = sum(row["search"]["sampled_tokens"] for row in selected) / len(selected)
            return f"correct {correct:.0%}, {tokens:.0f} tokens per problem"

        def more(first: int) -> Iterator[tuple[int, list[Row]]]:
            from trl_drgrpo.evaluation.models import Decoding, Loading
            from trl_drgrpo.evaluation.running import check_rows_fit

            server = args.vllm_server_base_url
            model = model_path(args.model)
            # A server says itself what is too long.
            if server is None:
                check_rows_fit(rows, model, Loading(), Decoding(args.max_completion_length))
            functions = {"verifier": verifier, "prm": prm}
            problems = collect(rows, model, first=first, vllm_server_base_url=server, **functions, **settings)
            return enumerate(problems, first + 1)

        facts = facts_of(args, rows)
        group = args.problems_at_once
        completions = completed_rows(args.output, "search", facts, len(rows), group, "problems", more, status)
    # Numbers come first: should a disk be full, they are on the terminal.
    numbers = summary(completions)
    for_training = []
    if args.sft_output:
        for_training = sft_rows(completions)
        numbers["sft_rows"] = len(for_training)
    console.print_numbers(numbers, output=args.output)
    if args.sft_output:
        write_rows(args.sft_output, for_training)
    return 0


# label-steps ---------------------------------------------------------------------------------------------------------

# Prompts whose completions are rolled out together, with seeds of their own.
GROUP = 32
# Tokens of a continuation, where neither a flag nor a recipe says.
LONGEST = 512
_KEYS = ("dataset_config", "dataset_train_split", "rename_columns", "correct_reward", "step_separator")


def add_arguments_label_steps(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options to a parser."""
    add = parser.add_argument
    with_default = partial(console.add_default, parser)
    keys = [key for key in (*_KEYS, *ANSWER_KEYS) if key != "max_completion_length"]
    add_keys(parser, keys)
    # A flag that is left out is no attribute of the arguments, so that the recipe's value counts.
    from_recipe: dict[str, Any] = {"default": argparse.SUPPRESS}
    add(
        "--dataset_name",
        "--data",
        dest="dataset_name",
        help=f"prompts: {_DATA}, with the columns the reward needs",
        **from_recipe,
    )
    add(
        "--reward_funcs",
        "--reward",
        dest="reward_funcs",
        nargs="+",
        metavar="REWARD",
        help="outcome reward: a name, package.module.f, file.py:f or {name: {option: value}}",
        **from_recipe,
    )
    add(
        "--max_new_tokens",
        "--max_completion_length",
        dest="max_completion_length",
        help=f"longest continuation (default: the recipe's max_completion_length, else {LONGEST})",
        **from_recipe,
    )
    add("--output", type=os.path.expanduser, required=True, help="JSON Lines file to write")
    with_default("--rollouts", 8, "rollouts per step")
    with_default("--completions", 1, "completions per prompt")
    with_default("--batch_size", 32, "continuations per forward pass")
    with_default("--seed", 0, "sampling seed")
    parser.set_defaults(keys_in_use=(*parser.get_default("keys_in_use"), "reward_funcs"))


def run_label_steps(args: argparse.Namespace) -> int:
    """`trl-drgrpo label-steps`: label the steps of a model's completions by rollouts and a verifier.

    For each prompt sample completions, split them into steps as a run does and roll out from the end of every step: a
    step is labeled good if at least one rollout is accepted by the outcome reward. Writes prompt, steps, labels and
    values as JSON Lines, for `trl-drgrpo train-prm`. Run it again to continue.

    The file that is written is what `trl-drgrpo train-prm --data` reads. A recipe (`--config`, or that of the run in
    `--model`) brings data, reward, prompts and sampling along. A summary goes to standard output, progress to
    standard error. Exit codes: 0 done, 2 bad input.
    """
    settings, segmenter = _checked_labeling(args)
    values = settings.values
    decoding = settings.decoding
    specs: Any = values["reward_funcs"]
    with console.stdout_to_stderr():
        rewards = {reward_name(reward): reward for reward in map(resolve_reward, specs)}
        name = CorrectnessRule(list(rewards), values.get("correct_reward")).name
        verifier = rewards[name]
        rows = prompt_rows(values, [(name, verifier, ())])
        # Rows that have steps keep them. A null beside such rows means that the row is sampled. The rows themselves
        # stay as they are read: a file that is gone on with names their digest.
        labeled_rows = []
        for row in rows:
            labeled_row = dict(row)
            if not row.get("steps"):
                labeled_row.pop("steps", None)
            labeled_rows.append(labeled_row)

        def more(first: int) -> Iterator[tuple[int, list[Row]]]:
            from trl_drgrpo.evaluation.models import load_model, load_tokenizer
            from trl_drgrpo.evaluation.running import check_rows_fit
            from trl_drgrpo.process_rewards.monte_carlo import TransformersRollouts, label_steps

            check_rows_fit(rows, settings.model, settings.loading, decoding, settings.template)
            tokenizer = load_tokenizer(settings.model, settings.loading)
            generate = TransformersRollouts(
                load_model(settings.model, settings.loading),
                tokenizer,
                max_new_tokens=decoding.max_completion_length,
                batch_size=args.batch_size,
                seed=args.seed,
                generation=decoding.for_transformers(),
            )
            for start in range(first, len(rows), GROUP):
                # Seeds go by the number of calls, and a group makes two: completions, then rollouts. So a labeling
                # that goes on samples what it would have sampled in one piece.
                generate.calls = 2 * start // GROUP
                group = labeled_rows[start : start + GROUP]
                labeled = label_steps(
                    group,
                    generate,
                    verifier,
                    tokenizer,
                    separator=segmenter,
                    rollouts=args.rollouts,
                    completions=args.completions,
                    template=settings.template,
                )
                yield start + len(group), list(labeled)

        def status(labeled: list[Row]) -> str:
            labels = _labels(labeled)
            return f"{sum(labels)} of the last {len(labels)} steps are good"

        # The options of the call say nothing of what a recipe has brought along.
        facts = facts_of(args, rows)
        for key in ("model_name_or_path", "dataset_name", "reward_funcs", *_KEYS):
            facts[key] = values.get(key)
        facts |= asdict(decoding) | asdict(settings.loading)
        facts |= {"step_separator": segmenter.name, "chat_template_kwargs": settings.template}
        labeled = completed_rows(args.output, "labeling", facts, len(rows), GROUP, "prompts", more, status)
    labels = _labels(labeled)
    # The last step ends the completion, so its value is the verifier's judgment of the whole.
    correct = sum(row["values"][-1] == 1.0 for row in labeled)
    numbers = {
        "rows": len(labeled),
        "steps": len(labels),
        "good_frac": sum(labels) / max(len(labels), 1),
        "correct_frac": correct / max(len(labeled), 1),
    }
    console.print_numbers(numbers, output=args.output)
    return 0


def _checked_labeling(args: argparse.Namespace) -> tuple[CallSettings, StepSegmenter]:
    """Return the values of a call and its segmenter, checked without reading data or loading a model."""
    refuse_low_numbers(args, rollouts=1, completions=1, batch_size=1)
    settings = read_settings(args)
    values = settings.values
    values.setdefault("max_completion_length", LONGEST)
    refuse_outside("temperature", settings.decoding.temperature, positive(remedy="Greedy rollouts are all the same."))
    needed = {"dataset_name": "a dataset with prompts", "reward_funcs": "an outcome reward"}
    for field, expected in needed.items():
        if not values.get(field):
            raise InputError(field, "none", expected, f"Add --{field}, or a recipe (--config) that has it.")
    check_file("output", args.output, [values["dataset_name"]], streams=False)
    return settings, segmenter_without_turns(values.get("step_separator") or DEFAULT_SEPARATOR)


def _labels(rows: list[Row]) -> list[bool]:
    """Return the labels of all steps. A step that the verifier could not judge has none."""
    labels = []
    for row in rows:
        labels += [label for label in row["labels"] if label is not None]
    return labels
