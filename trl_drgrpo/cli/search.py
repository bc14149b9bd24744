"""`trl-drgrpo search`: trajectories of a model, found with a verifier or a process reward model, as training data.

Search completions of each prompt within a budget of sampled tokens, and write them with steps, values, visit counts
and outcomes: for `train-prm`, `score` and, with --sft_output, SFT with TRL. For supervised training only: in GRPO
groups such completions bias the gradient. Run it again to continue.

The rows go to `--output`, a summary to standard output, progress to standard error. Exit codes: 0 done, 2 bad input or
a reward that failed.
"""

import argparse
from collections.abc import Iterator
from typing import Any

from trl_drgrpo.cli import console, data
from trl_drgrpo.cli.batch import completed_rows, facts_of, prompt_rows, write_rows
from trl_drgrpo.cli.data import check_prompting
from trl_drgrpo.cli.job import model_path
from trl_drgrpo.cli.values import named_reward, reward_spec
from trl_drgrpo.common.disk import check_file
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.hub_errors import check_local
from trl_drgrpo.common.ranges import refuse_outside, whole
from trl_drgrpo.common.rows import check_prompt_rows
from trl_drgrpo.evaluation.models import is_adapter
from trl_drgrpo.process_rewards.named import step_reward


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options to a parser."""
    add = parser.add_argument
    console.add_model(parser, "folder or Hub id of the causal language model", required=True)
    add("--dataset_name", required=True, help="prompts: Hub id, folder, file, or reasoning_gym:<task>, as in train")
    add("--strategy", required=True, help="best_of_n, beam (over steps) or puct (over steps)")
    add("--budget_tokens", type=int, required=True, help="maximum sampled tokens per problem, kept or not")
    add("--output", required=True, help="JSON Lines file to write, one row per completion")
    add("--sft_output", help="JSON Lines file for SFT: prompt and completion of correct completions")
    add("--reward_funcs", help="verifier: a name, file.py:f or {name: {option: value}}; guides without --prm")
    add("--prm", help="folder of a process reward model, or a step reward function (name, path, mapping); guides")
    add("--path_value", default="min", help="value of a path: min, product or last of its step scores (default: min)")
    add("--width", type=int, default=4, help="beams (default: 4)")
    add("--children", type=int, default=4, help="continuations sampled from a step (default: 4)")
    add("--exploration", type=float, default=1.0, help="c of PUCT (default: 1)")
    add("--accept_above", type=float, default=0.5, help="a completion is correct above this reward (default: 0.5)")
    add("--on_reward_error", default="raise", help="raise (stop, keep finished problems) or unscorable")
    add("--step_separator", default="\\n", help=r"as in train; \n is a line break (default: \n)")
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
    settings = _settings(args)
    from trl_drgrpo.search.collecting import OWN_COLUMNS, collect, sft_rows, summary

    with console.stdout_to_stderr():
        rewards = _rewards(args)
        rows = _rows(args, **rewards)
        check_prompt_rows(rows, "dataset_name", OWN_COLUMNS)
        options = {**rewards, "vllm_server_base_url": args.vllm_server_base_url, **settings}
        selected: list[dict[str, Any]] = []

        def status(of_problem: list[dict[str, Any]]) -> str:
            selected.extend(row for row in of_problem if row["selected"])
            correct = sum(bool(row["correct"]) for row in selected) / len(selected)
            tokens = sum(row["search"]["sampled_tokens"] for row in selected) / len(selected)
            return f"correct {correct:.0%}, {tokens:.0f} tokens per problem"

        def more(first: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
            return enumerate(collect(rows, model_path(args.model), first=first, **options), first + 1)

        facts, group = facts_of(args, rows), settings["problems_at_once"]
        found = completed_rows(args.output, "search", facts, len(rows), group, "problems", more, status)
    numbers = summary(found)
    if args.sft_output:
        kept = sft_rows(found)
        numbers["sft_rows"] = len(kept)
        write_rows(args.sft_output, kept)
    console.print_numbers(numbers, output=args.output)
    return 0


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of the search, checked before anything heavy is imported."""
    from dataclasses import fields

    from trl_drgrpo.search.problem import SearchSettings, check_values

    refuse_outside("limit", args.limit, whole(1, optional=True, remedy="Leave it out for all prompts."))
    settings = {field.name: getattr(args, field.name) for field in fields(SearchSettings)}
    SearchSettings(**settings)
    check_values(args.reward_funcs, args.prm)
    if args.vllm_server_base_url is None or not is_adapter(model_path(args.model)):  # a server knows its base
        check_local("model", model_path(args.model))
    data.check_source(args.dataset_name)
    check_prompting(args.prompt_template, args.system_prompt)
    check_file("output", args.output)
    if args.sft_output:
        if not args.reward_funcs:
            got, expected = "a file without reward_funcs", "a verifier that says what is correct"
            raise InputError("sft_output", got, expected, "Leave it out, or name a verifier.")
        check_file("sft_output", args.sft_output, [args.output, args.dataset_name])
    return settings


def _rewards(args: argparse.Namespace) -> dict[str, Any]:
    """Verifier and process reward model; `None` for one that is not given."""
    return {
        "verifier": args.reward_funcs and named_reward(args.reward_funcs, "reward_funcs"),
        "prm": args.prm and step_reward(reward_spec(args.prm, "prm"), "prm"),
    }


def _rows(args: argparse.Namespace, verifier: Any, prm: Any) -> list[dict[str, Any]]:
    """The prompts as the model is to see them, with the columns that the rewards need."""
    split = data.load_data(args.dataset_name, name=args.dataset_config, split=args.dataset_train_split)
    rewards = [(args.reward_funcs, verifier, ()), (args.prm, prm, ("steps", "step_ends"))]
    return prompt_rows(
        split,
        args.dataset_name,
        [each for each in rewards if each[1] is not None],
        renamings=args.rename_columns,
        prompt_template=args.prompt_template,
        system_prompt=args.system_prompt,
        limit=args.limit,
    )
