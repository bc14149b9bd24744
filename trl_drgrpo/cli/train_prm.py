"""`trl-drgrpo train-prm`: train a process reward model from labeled steps.

Results go to standard output, one number per line; progress to standard error. The model that is saved loads in
`trl_drgrpo.process_rewards.TokenClassificationScorer`. Exit codes: 0 done, 2 bad input.
"""

import argparse
from pathlib import Path
from typing import Any

from trl_drgrpo.cli import console
from trl_drgrpo.cli.job import model_path
from trl_drgrpo.common.disk import check_writable, sole_writer
from trl_drgrpo.common.hub_errors import check_local
from trl_drgrpo.common.ranges import refuse_out_of_range, refuse_outside, whole
from trl_drgrpo.features.resume.checkpoints import choose_start

FORMATS = ("stepwise", "prm800k", "math_shepherd")  # of process_rewards.stepwise_data, which is imported later


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options to a parser."""
    parser.description = (
        "Train a language model with a head of two classes per token to tell good steps from bad ones. The data is a "
        "JSON Lines file with prompt, steps (list of texts) and labels (list of booleans); published PRM800K and "
        "Math-Shepherd files are converted."
    )
    console.add_model(parser, "folder or Hub id of the language model to start from", required=True)
    add = parser.add_argument
    add("--dataset_name", "--data", dest="data", required=True, help="JSON Lines file of labeled steps")
    add("--output_dir", required=True, help="folder for the trained model and its tokenizer")
    replace = "replace the model in output_dir, which is refused otherwise"
    add("--overwrite_output_dir", nargs="?", const="true", default="false", choices=("true", "false"), help=replace)
    add("--eval_data", help="file in the same format for evaluation after training")
    add("--format", choices=FORMATS, default="stepwise", help="shape of the rows (default: stepwise)")
    add("--step_separator", default="\\n", help=r"text after every step; \n is a line break (default: \n)")
    longest = "prompts of longer rows are truncated from the left (default: 2048)"
    add("--max_length", type=int, default=2048, help=longest)
    add("--learning_rate", type=float, default=1e-5, help="(default: 1e-5)")
    add("--num_train_epochs", type=float, default=1.0, help="(default: 1)")
    add("--max_steps", type=int, default=-1, help="optimizer steps, over num_train_epochs if positive")
    add("--per_device_train_batch_size", type=int, default=8, help="(default: 8)")
    add("--gradient_accumulation_steps", type=int, default=1, help="(default: 1)")
    add("--logging_steps", type=int, default=10, help="(default: 10)")
    add("--seed", type=int, default=42, help="(default: 42)")
    add("--bf16", action="store_true", help="compute in bfloat16; the weights stay in float32")


def run(args: argparse.Namespace) -> int:
    """Train, save and print the numbers."""
    from trl_drgrpo.process_rewards.training import read_labeled_steps

    refuse_out_of_range(vars(args))
    refuse_outside("max_length", args.max_length, whole(1, remedy="Give a positive number of tokens."))
    check_local("model_name_or_path", model_path(args.model))
    check_writable("output_dir", args.output_dir)
    rows = read_labeled_steps(args.data, args.format)  # before anything heavy is imported
    eval_rows = read_labeled_steps(args.eval_data, args.format) if args.eval_data else None
    from trl_drgrpo.process_rewards.training import train_prm

    fields = ("learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size")
    fields += ("gradient_accumulation_steps", "logging_steps", "seed", "bf16")
    arguments: dict[str, Any] = {field: getattr(args, field) for field in fields}
    with sole_writer("output_dir", Path(args.output_dir)), console.stdout_to_stderr():
        choose_start(
            Path(args.output_dir),
            vars(args).get("resume_from_checkpoint"),
            args.overwrite_output_dir == "true",
        )
        numbers = train_prm(
            model_path(args.model),
            rows,
            args.output_dir,
            eval_rows=eval_rows,
            step_separator=args.step_separator.replace("\\n", "\n"),
            max_length=args.max_length,
            arguments=arguments,
        )
    console.print_numbers(numbers, model=args.output_dir)
    return 0
