"""`check`, `demo`, `merge` and `report`: each calls one room of the package, and prints what it returns."""

import argparse
import dataclasses
import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trl_drgrpo.cli import console
from trl_drgrpo.common.disk import is_stream, room_needed
from trl_drgrpo.common.errors import InputError, shortened
from trl_drgrpo.common.reading import user_path
from trl_drgrpo.demo import STOCK_OBJECTIVES


def stay_offline_and_quiet() -> None:
    """No network, no wall of notices, set before the heavy imports, which read the environment once; and one thread:
    so small a model gains nothing from more, and they stall where cores are shared."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch
    from datasets.utils import disable_progress_bars
    from huggingface_hub import constants
    from transformers.utils import logging as transformers_logging

    constants.HF_HUB_OFFLINE = True  # where it was imported before
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    disable_progress_bars()


# check ---------------------------------------------------------------------------------------------------------------


def add_arguments_check(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--full", action="store_true", help="all 48 combinations of the matrix, about a minute")
    parts.add_argument("--credit", action="store_true", help="the enumerated expected gradients only, seconds")
    term = "a `LossTerm` of yours: does it stay exact under the fast path? Seconds"
    parts.add_argument("--loss_term", metavar="FILE.py:CLASS", action="append", help=term)
    model = (
        "a model's folder (its config.json is enough) or Hub id: which parts of the fast path it gets, whether its "
        "gradient and tokens are right, and whether it can be planned, by a small random model of the kind; seconds"
    )
    parts.add_argument("--model", metavar="NAME_OR_FOLDER", help=model)
    parser.add_argument("--trust_remote_code", action="store_true", help="with --model: run the code in its folder")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every case, not only those that fail")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead")


def run_check(args: argparse.Namespace) -> int:
    """`trl-drgrpo check`: is Dr. GRPO computed correctly in *this* environment?

    Lists the seams of TRL that the package relies on, trains a tiny model over a matrix of settings and compares loss
    and gradient with the written-down objective in float64, then enumerates small policies and compares the expected
    gradient of the package's credit with the exact one. No download, no accelerator, about half a minute.
    With `--model`: what this one model gets of the fast path.
    """
    if args.model is not None:
        return _check_model(args)
    if args.trust_remote_code:
        raise InputError("--trust_remote_code", "no --model", "--model with it", "Name the model, or remove it.")
    stay_offline_and_quiet()  # nothing here needs the network, and TRL would report the run
    from trl_drgrpo.check import credit, parity
    from trl_drgrpo.features.fast_path.speed import in_words
    from trl_drgrpo.upstream.kv_cache import check_decoding
    from trl_drgrpo.upstream.seams import check_upstream
    from trl_drgrpo.upstream.versions import provenance

    def say(text: str) -> None:
        if not args.json:
            print(text, flush=True)

    def row(passed: bool, text: str) -> None:
        if args.verbose or not passed:
            say(f"  {'ok  ' if passed else 'FAIL'} {text}")

    def said(results: Iterable[Any], line: Callable[[Any], str], difference: str) -> list[Any]:
        """Results, each said as soon as it is there, and their summary."""
        found = []
        for result in results:
            row(result.passed, line(result))
            found.append(result)
        exact, controls = ([each for each in found if each.control is kind] for kind in (False, True))
        largest = max((getattr(each, difference) for each in exact), default=math.nan)
        say(f"  {_passed(exact)} agree, largest difference {largest:.1e}")
        say(f"  {_passed(controls)} controls differ (other objectives, published constructions), as they must")
        return found

    flags = "".join(f" --{name}" for name in ("full", "credit", "json") if getattr(args, name))
    terms = [_loss_term(path) for path in args.loss_term or ()]
    seams, decoding = check_upstream(), check_decoding()
    moved, results = any(seams.values()), []
    report: dict[str, Any] = {
        **provenance(f"trl-drgrpo check{flags}"),
        "seams": {name: problem or "ok" for name, problem in seams.items()},
        "decoding_seams": {name: problem or "ok" for name, problem in decoding.items()},
    }
    say("  ".join(f"{package} {number}" for package, number in report["versions"].items()))
    say("\nInternals of trl.GRPOTrainer that this package relies on")
    for name, problem in seams.items():
        row(not problem, f"{name}{': ' + problem if problem else ''}")
    say(f"  {sum(not problem for problem in seams.values())} of {len(seams)} are as expected")
    for name, problem in decoding.items():
        row(not problem, f"{name} (generation in transformers){': ' + problem if problem else ''}")
    with _without_warnings():
        if terms and not moved:
            from trl_drgrpo.check.loss_terms import check_loss_terms

            say("\nGradient with the loss terms, in TRL's micro-batches and in others (|difference|, relative)")
            found = said(check_loss_terms(terms), _loss_term_case, "gradient_difference")
            report["loss_terms"] = [vars(r.case) | {k: v for k, v in vars(r).items() if k != "case"} for r in found]
            results += found
        if not (args.credit or terms or moved):
            say("\nLoss and gradient against the specification (|difference|, relative for the gradient)")
            head = f"  {'':4} {'rows x accum / gen / iter':26} {'beta':>5} {'LoRA':>5} {'loss':>9} {'gradient':>9}"
            if args.verbose:
                say(head)
            results += said(map(parity.run_case, parity.cases(args.full)), _case, "gradient_difference")
            report["cases"] = [vars(r.case) | {k: v for k, v in vars(r).items() if k != "case"} for r in results]
            report["speed"] = parts = _speed_of_tiny_model()
            say(f"  fast path: {in_words(parts)}")
            row(not _lacks_parts(parts), "every part of the fast path that a CPU has")
        if not (terms or moved):
            say("\nExpected gradient of the credit, enumerated, against the exact one (|difference|, relative)")
            credited = said(map(credit.run_credit_case, credit.credit_cases()), _credit, "difference")
            report["credit"] = [vars(result) for result in credited]
            results += credited
    failed = sum(not result.passed for result in results)
    proven = "step credit is unbiased" if args.credit else "the trainer computes Dr. GRPO"
    if terms:
        proven = "rows may be skipped, regrouped and packed with these loss terms"
    verdict = f"{len(results)} of {len(results)} cases passed: {proven} here."
    if failed:
        verdict = f"{failed} of {len(results)} cases FAILED: do not trust runs in this environment."
        if terms:
            verdict = (
                f"{failed} of {len(results)} cases FAILED. A term that depends on the rows beside a token needs "
                "micro_batching='upstream'. One with a loss where there is no advantage needs reads_all_rows = True. "
                "One that changes nothing is seen as well."
            )
    if moved:
        verdict = "TRL has changed where this package relies on it: nothing further was run."
    say(f"\n{verdict}")
    slow = any(decoding.values()) or _lacks_parts(report.get("speed", {}))
    if slow:
        say("Generation or training is slower here than it need be; the lines above say why.")
    passed = not (moved or failed or slow)
    if args.json:
        print(json.dumps({**report, "passed": passed}, indent=2))
    return 0 if passed else 1


def _loss_term(path: str) -> Any:
    """The class, or object, of a loss term at `file.py:name` or `module.name`."""
    from trl_drgrpo.rewards.recipe_rewards import resolve_object
    from trl_drgrpo.upstream.hooks import LossTerm

    term = resolve_object(path, "loss_term")
    if not (isinstance(term, LossTerm) or (isinstance(term, type) and issubclass(term, LossTerm))):
        remedy = "Derive it from trl_drgrpo.LossTerm."
        raise InputError("loss_term", f"{path}, {shortened(term)}", "a LossTerm, or a class of them", remedy)
    return term


def _loss_term_case(result: Any) -> str:
    must = " (must differ)" if result.control else ""
    return f"{result.gradient_difference:9.1e}  {result.case.name}{must}"


def _lacks_parts(parts: Mapping[str, str]) -> bool:
    """Return whether a part of the fast path is off that any machine has."""
    return any(reason != "yes" for part, reason in parts.items() if part != "recorded steps")


def _speed_of_tiny_model() -> dict[str, str]:
    from trl_drgrpo.check.model import fast_path_of
    from trl_drgrpo.check.tiny import tiny_model, tiny_tokenizer

    return fast_path_of(tiny_model(tiny_tokenizer()))


def _check_model(args: argparse.Namespace) -> int:
    """Print what one model gets, as lines or as JSON. Exit code 1: its gradient or its tokens are wrong."""
    from trl_drgrpo.check.small import read_config
    from trl_drgrpo.cli.run_keys import model_path

    config = read_config(model_path(args.model), args.trust_remote_code)  # may ask the Hub; nothing behind it does
    stay_offline_and_quiet()
    from trl_drgrpo.check.model import TOLERANCE, check_model
    from trl_drgrpo.upstream.versions import provenance

    with _without_warnings():
        result = check_model(config, args.trust_remote_code)
    report = {**provenance("trl-drgrpo check --model"), "model": args.model, **vars(result), "passed": result.passed}
    if args.json:
        print(json.dumps(report, indent=2))
        return 0 if result.passed else 1
    print("  ".join(f"{package} {number}" for package, number in report["versions"].items()))
    print(f"\nThe fast path of {result.architecture}, made small, with random weights")
    for part, reason in result.parts.items():
        print(f"  {part:24} {reason if reason == 'yes' else 'no: ' + reason}")
    billions = "" if result.parameters is None else f", {result.parameters / 1e9:.2f} billion weights"
    print(f"  {'plan':24} {result.plan if result.plan == 'yes' else 'no: ' + result.plan}{billions}")
    print(f"  gradient {result.gradient_difference:.1e} from that of TRL's micro-batches (at most {TOLERANCE:.0e})")
    print(f"  {result.equal_tokens:.0%} of the completions are those of transformers' own loop")
    right = "Its gradient and its tokens are right here."
    wrong = "Its gradient or its tokens are WRONG here: set micro_batching='upstream', and report it."
    print(f"\n{right if result.passed else wrong}")
    return 0 if result.passed else 1


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Errors only from the libraries below."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(disabled)


def _case(result: Any) -> str:
    case = result.case
    geometry = f"{case.micro_batch} x {case.accumulation} / {case.steps_per_generation} / {case.num_iterations}"
    settings = f"{geometry:26} {case.beta:5g} {'yes' if case.lora else 'no':>5}"
    must = f" (must differ: cosine {result.cosine:.2f})" if case.control else ""
    return f"{settings} {result.loss_difference:9.1e} {result.gradient_difference:9.1e}  {case.name}{must}"


def _credit(result: Any) -> str:
    must = " (must differ: what is left at the best learning rate)" if result.control else ""
    return f"{result.environment:26} {result.difference:9.1e}  {result.credit}{must}"


def _passed(results: Sequence[Any]) -> str:
    return f"{sum(result.passed for result in results)} of {len(results)}"


# demo ----------------------------------------------------------------------------------------------------------------


def add_arguments_demo(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add = parser.add_argument
    folder = (
        "folder for model/, report.html, curves.png and results.json (default: runs/demo). Files of an earlier "
        "demo are overwritten; other files of the same names are an error"
    )
    add("--output_dir", type=user_path, default=Path("runs/demo"), help=folder)
    add("--steps", type=int, help="training steps (default: 200, with --process 60)")
    add("--seed", type=int, default=0, help="seed of training problems and sampling (default: 0)")
    process = "long lists, and a reward for every line next to the outcome: a rule checks each step of a completion"
    add("--process", action="store_true", help=process)
    compare = (
        "then train the same with stock TRL under its objectives, each as many steps as the demo itself, write "
        "comparison.html of all runs and draw accuracy over CPU time (pace.png); without a name: "
        f"{', '.join(STOCK_OBJECTIVES)}"
    )
    add("--compare", nargs="*", metavar="OBJECTIVE", choices=tuple(STOCK_OBJECTIVES), help=compare)


def run_demo(args: argparse.Namespace) -> int:
    """`trl-drgrpo demo`: train a real, tiny model with Dr. GRPO on this machine, offline, and see whether it learns.

    Train the model that this package ships (about 145 thousand parameters) with DrGRPOTrainer on adding lists of
    digits. Runs offline on the CPU in a minute or two.

    Results go to standard output, progress to standard error. Exit codes: 0 sampled accuracy on held-out problems rose
    by at least 40 percentage points, 1 by less, 130 interrupted.
    """
    compare = list(STOCK_OBJECTIVES) if args.compare == [] else args.compare or []
    try:
        stay_offline_and_quiet()
        from rich.console import Console

        from trl_drgrpo.demo.result import print_report
        from trl_drgrpo.demo.run import run_demo

        results, progress = Console(), Console(stderr=True)
        progress.print("loading libraries and model ...")
        with room_needed(args.output_dir, lambda: "What was measured until then stands above."):
            result = run_demo(args.output_dir, args.seed, args.steps, args.process, compare, console=progress)
    except KeyboardInterrupt:
        console.log(f"\nthe model and the numbers so far are in {args.output_dir}")
        raise
    print_report(result, results)
    numbers, learned = result.numbers, result.numbers["learned"]
    gain, steps, claim = numbers["gain_points"], numbers["settings"]["steps"], numbers["required_gain_points"]
    taken = (took for stage, took in numbers["seconds"].items() if stage.removeprefix("train_") not in compare)
    verdict = f"Learned: sampled accuracy {gain:+.1f} points in {sum(taken):.0f} s."
    if not learned:
        claimed = f"the demo claims at least +{claim:.0f}."
        verdict = f"NOT LEARNED: sampled accuracy changed by {gain:+.1f} points in {steps} steps; {claimed}"
    results.print(f"\n{verdict}", highlight=False)
    return 0 if learned else 1


# merge ---------------------------------------------------------------------------------------------------------------


def add_arguments_merge(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add = parser.add_argument
    add("adapter", metavar="ADAPTER_DIR", help="folder with adapter_config.json: a run's or a checkpoint")
    folder = "folder to write; must not exist"
    add("--output_dir", "--output", dest="output", required=True, metavar="DIR", help=folder)
    add("--base", help="folder or Hub id of the base model (default: the adapter's)")
    add("--dtype", help="float32, bfloat16 or float16 (default: the base model's own)")
    add("--trust_remote_code", action="store_true", help="run the base model's code")


def run_merge(args: argparse.Namespace) -> int:
    """`trl-drgrpo merge ADAPTER_DIR --output_dir DIR`: an adapter merged into its base model, checked, in one folder.

    Load the base model in float32, merge the adapter, save the model with its tokenizer, and compare the logits of
    what was written with those of base and adapter. Needs 4 bytes of memory per parameter.

    The result goes to standard output as YAML, everything else to standard error.
    """
    from trl_drgrpo.cli.recipe import dump
    from trl_drgrpo.single_gpu.merging import merge_adapter

    options = {name: getattr(args, name) for name in ("base", "dtype", "trust_remote_code")}
    with console.stdout_to_stderr():
        report = merge_adapter(args.adapter, args.output, **options)
    console.print_result(dump(dataclasses.asdict(report)))
    return 0


# report --------------------------------------------------------------------------------------------------------------


def add_arguments_report(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add = parser.add_argument
    add("run_dirs", nargs="+", metavar="RUN_DIR", help="output_dir of a run")
    add("--format", choices=("html", "md", "json", "png"), help="output format (default: html)")
    file = "file to write (default: report.<format> in the run's _drgrpo folder; of several runs in this folder)"
    add("--output", type=os.path.expanduser, help=file)
    add("--max_groups", type=int, help="maximum groups of completions per run (default: as many as fit)")
    serve = "serve the page on this machine (127.0.0.1) and keep it up to date until Ctrl-C, instead of writing it"
    add("--follow", action="store_true", help=serve)
    add("--port", type=int, help="with --follow: port of the page (default: 0, a free one)")


def run_report(args: argparse.Namespace) -> int:
    """`trl-drgrpo report`: what one or several runs logged, as a page, Markdown, JSON or a figure; `--follow` serves
    the page while the runs go on.

    Write one self-contained HTML page (it opens without a network) over runs of DrGRPOTrainer or TRL's GRPOTrainer:
    curves, difficulty, completions colored by advantage, warnings, and how the runs differ. Works on runs that are
    going on, that crashed, and that were resumed.

    The path of the file that was written, or the address of the page, goes to standard output. Exit codes: 0 done, 2
    bad input, 130 Ctrl-C, which ends `--follow`.
    """
    if not args.follow:
        if args.port is not None:
            remedy = "Add --follow: without it a file is written."
            raise InputError("--port", str(args.port), "--follow with it", remedy)
        from trl_drgrpo.report import write_report

        path = write_report(args.run_dirs, args.output, args.format or "html", args.max_groups)
        if not is_stream(path):  # the name would stand behind the report
            print(path)
        return 0
    for name, value in (("--output", args.output), ("--format", args.format)):
        if value not in (None, "html"):
            remedy = "Remove it: the page is served, no file is written."
            raise InputError(name, repr(value), "nothing with --follow", remedy)
    from trl_drgrpo.report.write import FollowServer

    with FollowServer(args.run_dirs, args.max_groups, args.port or 0) as server:
        console.print_result(f"{server.url}\n")
        server.serve_forever()
    return 0
