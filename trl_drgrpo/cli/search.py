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
    console.add_model(parser, "folder or Hub id of the causal language model", required=True)
    add("--dataset_name", required=True, help=f"prompts: {_DATA}")
    add("--strategy", required=True, help="best_of_n, beam (over steps) or puct (over steps)")
    add("--budget_tokens", type=int, required=True, help="maximum sampled tokens per problem, kept or not")
    add("--output", type=os.path.expanduser, required=True, help="JSON Lines file to write, one row per completion")
    sft = "JSON Lines file for SFT: prompt and completion of correct completions"
    add("--sft_output", type=os.path.expanduser, help=sft)
    add("--reward_funcs", help="verifier: a name, file.py:f or {name: {option: value}}; guides without --prm")
    add("--prm", help="folder of a process reward model, or a step reward function (name, path, mapping); guides")
    add("--path_value", default="min", help="value of a path: min, product or last of its step scores (default: min)")
    add("--width", type=int, default=4, help="beams (default: 4)")
    add("--children", type=int, default=4, help="continuations sampled from a step (default: 4)")
    add("--exploration", type=float, default=1.0, help="c of PUCT (default: 1)")
    add("--accept_above", type=float, default=0.5, help="a completion is correct above this reward (default: 0.5)")
    add("--on_reward_error", default="raise", help="raise (stop, keep finished problems) or unscorable")
    add("--step_separator", default=DEFAULT_SEPARATOR, help=r"as in train (default: \n\n, an empty line)")
    add("--max_completion_length", type=int, default=512, help="longest completion in tokens (default: 512)")
    add("--temperature", type=float, default=1.0, help="sampling temperature (default: 1)")
    add("--top_p", type=float, default=1.0, help="nucleus sampling (default: 1)")
    add("--seed", type=int, default=0, help="sampling seed (default: 0)")
    batch = "continuations per forward pass, or requests at a time (default: 32)"
    add("--batch_size", type=int, default=32, help=batch)
    add("--problems_at_once", type=int, default=8, help="problems searched together (default: 8)")
    add("--vllm_server_base_url", help="sample with a vLLM server of --model, or of its base: http://localhost:8000")
    add("--dataset_train_split", default="train", help="split with the prompts (default: train)")
    add("--dataset_config", help="configuration of a Hub dataset")
    add("--rename_columns", nargs="+", default=[], metavar="OLD=NEW", help="for example question=prompt")
    add("--prompt_template", help="r1, qwen_math or a text with {prompt}, for base models")
    add("--system_prompt", help="message before every prompt")
    add("--limit", type=int, help="search only the first prompts")


def run(args: argparse.Namespace) -> int:
    """Search, write and sum up."""
    from trl_drgrpo.search.problem import SearchSettings, check_values

    refuse_low_numbers(args, limit=1)
    settings = {field.name: getattr(args, field.name) for field in fields(SearchSettings)}
    SearchSettings(**settings)
    check_values(args.reward_funcs, args.prm)
    if args.vllm_server_base_url is None or not is_adapter(args.model):  # a server has the base
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
        verifier = args.reward_funcs and _verifier(args.reward_funcs)
        prm = args.prm and step_reward(reward_spec(args.prm, "prm"), "prm")
        rewards = [(args.reward_funcs, verifier, ()), (args.prm, prm, ("steps", "step_ends"))]
        rows = prompt_rows(vars(args), [reward for reward in rewards if reward[1]], limit=args.limit)
        check_prompt_rows(rows, "dataset_name", OWN_COLUMNS)
        selected: list[Row] = []

        def status(of_problem: list[Row]) -> str:
            selected.extend(row for row in of_problem if row["selected"])
            correct = sum(bool(row["correct"]) for row in selected) / len(selected)
            tokens = sum(row["search"]["sampled_tokens"] for row in selected) / len(selected)
            return f"correct {correct:.0%}, {tokens:.0f} tokens per problem"

        def more(first: int) -> Iterator[tuple[int, list[Row]]]:
            from trl_drgrpo.evaluation.models import Decoding, Loading
            from trl_drgrpo.evaluation.running import check_rows_fit

            settings["vllm_server_base_url"] = args.vllm_server_base_url
            model = model_path(args.model)
            if args.vllm_server_base_url is None:  # a server says itself what is too long
                check_rows_fit(rows, model, Loading(), Decoding(args.max_completion_length))
            return enumerate(collect(rows, model, first=first, verifier=verifier, prm=prm, **settings), first + 1)

        facts = facts_of(args, rows)
        group = args.problems_at_once
        completions = completed_rows(args.output, "search", facts, len(rows), group, "problems", more, status)
    numbers = summary(completions)
    for_training = sft_rows(completions) if args.sft_output else []
    if args.sft_output:
        numbers["sft_rows"] = len(for_training)
    console.print_numbers(numbers, output=args.output)
    if args.sft_output:
        write_rows(args.sft_output, for_training)
    return 0


def _verifier(text: str) -> Any:
    return resolve_reward(reward_spec(text, "reward_funcs"), "reward_funcs")


# label-steps ---------------------------------------------------------------------------------------------------------

GROUP = 32  # prompts whose completions are rolled out together, with seeds of their own


_KEYS = ("dataset_config", "dataset_train_split", "rename_columns", "correct_reward", "step_separator")
LONGEST = 512  # tokens of a continuation, where neither a flag nor a recipe says


def add_arguments_label_steps(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options to a parser."""
    add = parser.add_argument
    keys = [key for key in (*_KEYS, *ANSWER_KEYS) if key != "max_completion_length"]
    add_keys(parser, keys)
    from_recipe: dict[str, Any] = {"default": argparse.SUPPRESS}  # the recipe's value, where the flag is left out
    prompts = f"prompts: {_DATA}, with the columns the reward needs"
    add("--dataset_name", "--data", dest="dataset_name", help=prompts, **from_recipe)
    reward = "outcome reward: a name, package.module.f, file.py:f or {name: {option: value}}"
    add("--reward_funcs", "--reward", dest="reward_funcs", nargs="+", metavar="REWARD", help=reward, **from_recipe)
    longest = f"longest continuation (default: the recipe's max_completion_length, else {LONGEST})"
    add("--max_new_tokens", "--max_completion_length", dest="max_completion_length", help=longest, **from_recipe)
    add("--output", type=os.path.expanduser, required=True, help="JSON Lines file to write")
    add("--rollouts", type=int, default=8, help="rollouts per step (default: 8)")
    add("--completions", type=int, default=1, help="completions per prompt (default: 1)")
    add("--batch_size", type=int, default=32, help="continuations per forward pass (default: 32)")
    add("--seed", type=int, default=0, help="sampling seed (default: 0)")
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
        verifier = rewards[CorrectnessRule(list(rewards), values.get("correct_reward")).name]
        rows = prompt_rows(values, [(reward_name(verifier), verifier, ())])
        labeled_rows = []
        for row in rows:
            labeled_row = dict(row)
            if "steps" in row and not row["steps"]:  # a null beside rows that have some: this one is sampled
                del labeled_row["steps"]
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
            options = {"rollouts": args.rollouts, "completions": args.completions, "template": settings.template}
            for start in range(first, len(rows), GROUP):
                generate.calls = 2 * start // GROUP  # a group samples completions, then rollouts
                group = labeled_rows[start : start + GROUP]
                labeled = label_steps(group, generate, verifier, tokenizer, separator=segmenter, **options)
                yield start + len(group), list(labeled)

        def status(labeled: list[Row]) -> str:
            labels = _labels(labeled)
            return f"{sum(labels)} of the last {len(labels)} steps are good"

        facts = facts_of(args, rows)
        for key in ("model_name_or_path", "dataset_name", "reward_funcs", *_KEYS):
            facts[key] = values.get(key)
        facts |= asdict(decoding) | asdict(settings.loading)
        facts |= {"step_separator": segmenter.name, "chat_template_kwargs": settings.template}
        labeled = completed_rows(args.output, "labeling", facts, len(rows), GROUP, "prompts", more, status)
    labels = _labels(labeled)
    correct = sum(row["values"][-1] == 1.0 for row in labeled)
    fractions = {"good_frac": sum(labels) / max(len(labels), 1), "correct_frac": correct / max(len(labeled), 1)}
    console.print_numbers({"rows": len(labeled), "steps": len(labels), **fractions}, output=args.output)
    return 0


def _checked_labeling(args: argparse.Namespace) -> tuple[CallSettings, StepSegmenter]:
    """Return the values of a call and its segmenter, checked without reading data or loading a model."""
    refuse_low_numbers(args, rollouts=1, completions=1, batch_size=1)
    settings = read_settings(args)
    values = settings.values
    values.setdefault("max_completion_length", LONGEST)
    refuse_outside("temperature", settings.decoding.temperature, positive(remedy="Greedy rollouts are all the same."))
    for field, expected in (("dataset_name", "a dataset with prompts"), ("reward_funcs", "an outcome reward")):
        if not values.get(field):
            raise InputError(field, "none", expected, f"Add --{field}, or a recipe (--config) that has it.")
    check_file("output", args.output, [values["dataset_name"]], streams=False)
    return settings, segmenter_without_turns(values.get("step_separator") or DEFAULT_SEPARATOR)


def _labels(rows: list[Row]) -> list[bool]:
    return [label for row in rows for label in row["labels"] if label is not None]
