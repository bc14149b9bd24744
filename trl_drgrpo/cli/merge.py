"""`trl-drgrpo merge ADAPTER_DIR --output_dir DIR`: an adapter merged into its base model, checked, in one folder.

Load the base model in float32, merge the adapter, save the model with its tokenizer, and compare the logits of what
was written with those of base and adapter. Needs 4 bytes of memory per parameter.

The result goes to standard output as YAML, everything else to standard error.
"""

import argparse
import dataclasses

from trl_drgrpo.cli import console
from trl_drgrpo.cli.recipe import dump
from trl_drgrpo.single_gpu.merging import merge_adapter


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options to a parser."""
    add = parser.add_argument
    add("adapter", metavar="ADAPTER_DIR", help="folder with adapter_config.json: a run's or a checkpoint")
    add(
        "--output_dir", "--output", dest="output", required=True, metavar="DIR", help="folder to write; must not exist"
    )
    add("--base", help="folder or Hub id of the base model (default: the adapter's)")
    add("--dtype", help="float32, bfloat16 or float16 (default: the base model's own)")
    add("--trust_remote_code", action="store_true", help="run the base model's code")


def run(args: argparse.Namespace) -> int:
    """Merge and print the report."""
    with console.stdout_to_stderr():
        report = merge_adapter(
            args.adapter, args.output, base=args.base, dtype=args.dtype, trust_remote_code=args.trust_remote_code
        )
    console.print_result(dump(dataclasses.asdict(report)))
    return 0
