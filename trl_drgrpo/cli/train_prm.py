"""`trl-drgrpo train-prm`: train a process reward model from labeled steps.

Train a language model with a head of two classes per token to tell good steps from bad ones. The data has prompt,
steps (list of texts) and labels (list of booleans, or of numbers from 0 to 1); published PRM800K and Math-Shepherd
files are converted.

Results go to standard output, one number per line; progress to standard error. The model that is saved loads in
`trl_drgrpo.process_rewards.TokenClassificationScorer`. Exit codes: 0 done, 2 bad input.
"""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

from trl_drgrpo.cli import console, data
from trl_drgrpo.cli.run_keys import check_model_name, model_path
from trl_drgrpo.common.disk import check_writable, sole_writer
from trl_drgrpo.common.hub_errors import check_local
from trl_drgrpo.common.output_folders import check_output_folder
from trl_drgrpo.common.ranges import refuse_bad_adapter, refuse_out_of_range, refuse_outside, whole
from trl_drgrpo.features.resume.checkpoints import choose_start
from trl_drgrpo.process_rewards.steps import DEFAULT_SEPARATOR
from trl_drgrpo.process_rewards.steps.segmenter import joining_text
from trl_drgrpo.rewards.scoring import read_json_lines

FORMATS = ("stepwise", "prm800k", "math_shepherd")  # of process_rewards.training, which is imported later
_INTERVALS = ("no", "steps", "epoch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options to a parser."""
    console.add_model(parser, "folder or Hub id of the language model to start from", required=True)
    add = parser.add_argument
    with_default = partial(console.add_default, parser)
    add(
        "--dataset_name",
        "--data",
        dest="data",
        required=True,
        help="labeled steps: Hub id, folder or file, as in train",
    )
    with_default("--dataset_train_split", "train", "split to train on")
    add("--dataset_test_split", help="split to evaluate on, of --eval_data, else of --dataset_name")
    add("--output_dir", type=os.path.expanduser, required=True, help="folder for the trained model and its tokenizer")
    add(
        "--overwrite_output_dir",
        nargs="?",
        const="true",
        default="false",
        choices=("true", "false"),
        help="replace the model in output_dir, which is refused otherwise",
    )
    add("--eval_data", help="data in the same format for evaluation")
    with_default("--format", "stepwise", "shape of the rows", choices=FORMATS)
    with_default("--labels", "labels", "column with the labels; values: train on the shares that label-steps writes")
    with_default("--neutral", "good", "what PRM800K's neutral steps count as", choices=("good", "bad", "ignore"))
    add("--step_separator", default=DEFAULT_SEPARATOR, help=r"text after every step (default: \n\n, an empty line)")
    with_default("--max_length", 2048, "prompts of longer rows are truncated from the left")
    add("--use_peft", action="store_true", help="train a LoRA adapter and the head; both are merged when saved")
    with_default("--lora_r", 16, "rank")
    with_default("--lora_alpha", 32)
    with_default("--lora_dropout", 0.0)
    add("--lora_target_modules", nargs="+", help="layers with an adapter (default: all linear ones)")
    add(
        "--resume_from_checkpoint",
        nargs="?",
        const=True,
        type=lambda text: {"true": True, "false": False}.get(text.lower(), text),
        help="checkpoint to go on from; true, or no value: the newest in output_dir",
    )
    group = parser.add_argument_group("fields of transformers.TrainingArguments")
    training = group.add_argument
    training_default = partial(console.add_default, group)
    training("--learning_rate", type=float, help="(default: 1e-5, with --use_peft 1e-4)")
    training_default("--num_train_epochs", 1.0)
    training("--max_steps", type=int, default=-1, help="optimizer steps, over num_train_epochs if positive")
    training_default("--per_device_train_batch_size", 8)
    training_default("--gradient_accumulation_steps", 1)
    training("--gradient_checkpointing", action="store_true", help="less memory, more time")
    training("--bf16", action="store_true", help="compute in bfloat16; weights in float32, but a frozen base")
    training_default("--logging_steps", 10)
    training("--report_to", nargs="+", default=["none"], help="trackers: wandb, trackio, ... (default: none)")
    training("--run_name", help="the run's name in trackers")
    training_default("--save_strategy", "no", "checkpoints", choices=_INTERVALS)
    training_default("--save_steps", 500, "with save_strategy steps")
    training("--save_total_limit", type=int, help="checkpoints that are kept (default: all)")
    training_default("--eval_strategy", "no", "evaluations during training", choices=_INTERVALS)
    training("--eval_steps", type=int, help="with eval_strategy steps (default: logging_steps)")
    training_default("--seed", 42)
    parser.set_defaults(training=[action.dest for action in group._group_actions])


def run(args: argparse.Namespace) -> int:
    """Train, save and print the numbers."""
    # The numbers first: they need nothing.
    values = {name: value for name, value in vars(args).items() if value is not None}
    refuse_out_of_range(values)
    refuse_outside("max_length", args.max_length, whole(1, remedy="Give a positive number of tokens."))
    lora: dict[str, Any] = {"r": args.lora_r, "lora_alpha": args.lora_alpha, "lora_dropout": args.lora_dropout}
    refuse_bad_adapter(lora, "lora: ")
    separator = joining_text(args.step_separator)
    check_model_name(args.model)
    # Refuses an adapter as well: its base would get a head, and stay frozen.
    check_local("model", model_path(args.model))
    check_writable("output_dir", args.output_dir)
    # Labels are checked before the model loads.
    rows = _rows(args, args.data, args.dataset_train_split)
    eval_rows = None
    if args.eval_data or args.dataset_test_split:
        eval_rows = _rows(args, args.eval_data or args.data, args.dataset_test_split or "train")
    from trl_drgrpo.process_rewards.training import train_prm

    adapter = None
    if args.use_peft:
        from peft import LoraConfig

        adapter = LoraConfig(**lora, target_modules=args.lora_target_modules or "all-linear")
    with sole_writer("output_dir", Path(args.output_dir)), console.stdout_to_stderr():
        resume = args.resume_from_checkpoint
        checkpoint = choose_start(Path(args.output_dir), resume, args.overwrite_output_dir == "true")
        # Nothing is written into a folder that is read.
        inputs = {"model": model_path(args.model), "dataset_name": args.data, "eval_data": args.eval_data or ""}
        check_output_folder("output_dir", args.output_dir, inputs)
        if resume and checkpoint is None:
            console.log(f"resume_from_checkpoint: {args.output_dir} holds no checkpoint, the training begins anew.")
        numbers = train_prm(
            model_path(args.model),
            rows,
            args.output_dir,
            eval_rows=eval_rows,
            step_separator=separator,
            max_length=args.max_length,
            peft_config=adapter,
            resume_from_checkpoint=checkpoint and str(checkpoint),
            dataset_name=args.data,
            arguments={name: values[name] for name in args.training if name in values},
        )
    console.print_numbers(numbers, model=args.output_dir)
    return 0


def _rows(args: argparse.Namespace, source: str, split: str) -> list[dict[str, Any]]:
    """Return the checked rows of a file, line by line where it is JSON, or of a dataset."""
    data.check_source(source)
    # `datasets` reads JSON into typed columns, in which labels cannot be booleans in one row and numbers in the next.
    # A single file is the split train.
    records: Any
    if split == "train" and data.FILE_TYPES.get(Path(source).suffix) == "json":
        records = read_json_lines(source)
    else:
        records = data.load_data(source, split=split)
    from trl_drgrpo.process_rewards.training import labeled_steps

    return labeled_steps(records, source, args.format, labels=args.labels, neutral=args.neutral)
