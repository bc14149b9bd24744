"""The inputs of `trl-drgrpo eval`, checked, the cheapest first: nothing loads a model here."""

import argparse
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trl_drgrpo.cli import console, data
from trl_drgrpo.cli.job import model_path
from trl_drgrpo.cli.kept_recipe import run_folder
from trl_drgrpo.cli.problems import digest
from trl_drgrpo.cli.prompts import check_prompting
from trl_drgrpo.cli.run_keys import PROMPT_KEYS, TEMPLATE_KEY, Given, read_given
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.folders import check_writable
from trl_drgrpo.common.ranges import RANGES, refuse_outside, whole

RULE_KEYS = ("correct_reward", "correct_threshold")
FOLDER = "eval_output"  # for models outside of a run


def checked(args: argparse.Namespace) -> Given:
    """The values of a call, checked without reading data. Completes `args.k`."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        remedy = (
            "Start it without accelerate or torchrun; a vLLM server (--vllm_server_base_url) uses several devices."
        )
        raise InputError("eval", f"{os.environ['WORLD_SIZE']} processes", "one", remedy)
    for field, least in (("num_samples", 1), ("batch_size", 1), ("limit", 1)):
        refuse_outside(field, getattr(args, field), whole(least, optional=True, remedy="Give a larger number."))
    refuse_outside("seed", args.seed, RANGES["seed"])
    args.k = sorted(set(args.k or (1, args.num_samples)))
    for k in args.k:
        remedy = "pass@k needs at least k completions of each prompt: raise num_samples."
        refuse_outside("k", k, whole(1, args.num_samples, remedy=remedy))
    given = read_given(args)
    if not given.values.get("dataset_name"):
        got = "a mixture (`datasets`)" if given.values.get("datasets") else "none"
        remedy = "Add for example --dataset_name test.jsonl, or `reasoning_gym:chain_sum?size=500`."
        raise InputError("dataset_name", got, "a dataset with prompts", remedy)
    data.check_source(given.values["dataset_name"])
    check_prompting(given.values.get("prompt_template"), given.values.get("system_prompt"))
    if not given.values.get("reward_funcs"):
        remedy = "Add for example --reward_funcs math_reward; a reward model cannot tell what is correct."
        raise InputError("reward_funcs", "none", "a reward for correct answers", remedy)
    if given.decoding().temperature == 0 and args.num_samples > 1:
        remedy = "Greedy decoding gives a single answer: remove num_samples, or raise the temperature."
        raise InputError("num_samples", f"{args.num_samples} at temperature 0", "1", remedy)
    from trl_drgrpo.evaluation.models import check_model

    given.template()
    check_model("model_name_or_path", given.model, given.loading(args.base).base)
    if baseline := baseline_of(args, given):
        try:
            check_model("baseline", model_path(baseline))
        except InputError as error:
            remedy = f"{error.remedy} Or skip the comparison: --baseline none."
            raise InputError(error.field, error.got, error.expected, remedy) from error
    check_writable("output_dir", str(output_of(args, given)))
    if args.pass_rates:
        check_writable("pass_rates", str(Path(args.pass_rates).parent))
    return given


def baseline_of(args: argparse.Namespace, given: Given) -> str | None:
    """The model to compare with, as it was named; `None` without one."""
    from trl_drgrpo.evaluation.models import base_name

    if args.baseline is not None:
        return None if args.baseline.lower() == "none" else args.baseline
    return given.trained_from or base_name(given.model, given.loading(args.base).base)


def output_of(args: argparse.Namespace, given: Given) -> Path:
    """The folder for samples and results."""
    from trl_drgrpo.evaluation.results import FOLDER as EVALUATIONS
    from trl_drgrpo.features.diagnostics.run_log import FOLDER as LOG_FOLDER

    if args.output_dir:
        return Path(args.output_dir).expanduser()
    run = run_folder(given.model)
    return Path(FOLDER) if run is None else run / LOG_FOLDER / EVALUATIONS


def check_rule(given: Given, names: list[str]) -> None:
    """Checks reward and threshold for correct completions; `names`: of the rewards."""
    from trl_drgrpo.features.diagnostics.correctness import CorrectnessRule

    refuse_outside("correct_threshold", given.values.get("correct_threshold"), RANGES["correct_threshold"])
    CorrectnessRule(names, given.values.get("correct_reward"))


def split_of(args: argparse.Namespace, given: Given) -> tuple[str, Any]:
    """The split's name and the split; never the training data without a word."""
    source = given.values["dataset_name"]
    splits: Any = data.load_data(source, name=given.values.get("dataset_config"))
    wanted = args.split or given.values.get("dataset_test_split") or "test"
    if args.split is None and wanted not in splits and len(splits) == 1:
        wanted = str(next(iter(splits)))
        console.log(f"{source} has no test split: evaluating on its only one, {wanted}.")
    return wanted, data.take_split(splits, wanted, source)


def facts_of(args: argparse.Namespace, given: Given, split: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Data, prompts and sampling, as the result states them."""
    return {
        "dataset": {
            "name": given.values["dataset_name"],
            "config": given.values.get("dataset_config"),
            "split": split,
            "prompts": len(rows),
            "digest": digest(rows),
        },
        "prompt": {key: given.values.get(key) for key in PROMPT_KEYS} | {TEMPLATE_KEY: given.template()},
        "sampling": {**asdict(given.decoding()), "num_samples": args.num_samples, "seed": args.seed},
    }
