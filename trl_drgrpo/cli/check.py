"""`trl-drgrpo check`: compare what this environment computes with the written-down objective.

Lists the seams of TRL that the package relies on, trains a tiny model over a matrix of settings and compares loss
and gradient with the specification in float64, then enumerates small policies and compares the expected gradient of
the package's credit with the exact one. On versions that were not tested it proves them anew (`host_proof/`);
elsewhere it shows the kept proof, if there is one. No download, no accelerator, about half a minute. With `--model`:
the parts of the fast path that one model gets.
"""

import argparse
import dataclasses
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trl_drgrpo.cli.short_commands import stay_offline_and_quiet
from trl_drgrpo.common.errors import InputError, shortened
from trl_drgrpo.host_proof import proving

if TYPE_CHECKING:
    from trl_drgrpo.check.credit import CreditResult
    from trl_drgrpo.check.parity import CaseResult
    from trl_drgrpo.upstream.hooks import LossTerm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--full", action="store_true", help="all 48 combinations of the matrix, about a minute")
    parts.add_argument("--credit", action="store_true", help="the enumerated expected gradients only, seconds")
    parts.add_argument(
        "--proof",
        action="store_true",
        help=(
            "the proof that a first training makes on versions that were not tested, now and on any versions: "
            "gradient, tokens, merged adapters and the parts of the fast path of a tiny model; seconds"
        ),
    )
    parts.add_argument(
        "--loss_term",
        metavar="FILE.py:CLASS",
        action="append",
        help="a `LossTerm` of yours: does it stay exact under the fast path? Seconds",
    )
    parts.add_argument(
        "--model",
        metavar="NAME_OR_FOLDER",
        help=(
            "a model's folder (its config.json is enough) or Hub id: which parts of the fast path it gets, whether "
            "its gradient and tokens are right, and whether it can be planned, by a small random model of the kind; "
            "seconds"
        ),
    )
    parser.add_argument("--trust_remote_code", action="store_true", help="with --model: run the code in its folder")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every case, not only those that fail")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead")


def run(args: argparse.Namespace) -> int:
    """Run the checks that the flags ask for; return 1 where one fails."""
    if args.model is not None:
        return _check_model(args)
    if args.trust_remote_code:
        raise InputError("--trust_remote_code", "no --model", "--model with it", "Name the model, or remove it.")
    # Nothing here needs the network, and TRL would report the run.
    stay_offline_and_quiet()
    terms = [_loss_term(path) for path in args.loss_term or ()]
    check = _Check(args.verbose, args.json)
    # The cheapest comparison comes first. Behind a name that has moved, the others would fail for that reason alone.
    with proving(), _without_warnings():
        check.compare_hosts(args)
        if check.has_moved:
            return check.end("TRL has changed where this package relies on it: nothing further was run.")
        # A flag for one part asks for that part alone.
        if terms:
            return check.end(check.compare_loss_terms(terms))
        if args.proof:
            check.prove_hosts(make=True)
            return check.end("Gradients and merged adapters are right here.")
        if not args.credit:
            check.prove_hosts(make=False)
            check.compare_trainer(args.full)
        check.compare_credit()
        proven = "step credit is unbiased" if args.credit else "the trainer computes Dr. GRPO"
        return check.end(check.verdict(proven, "do not trust runs in this environment."))


class _Check:
    """Comparisons of one run: each prints its lines, and adds to the report that `--json` prints."""

    def __init__(self, is_verbose: bool, prints_json: bool):
        self.is_verbose = is_verbose
        self.prints_json = prints_json
        self.results: list[Any] = []
        self.report: dict[str, Any] = {}
        self.has_moved = False
        self.is_slow = False
        self.is_wrong = False
        self.must_prove = False

    def compare_hosts(self, args: argparse.Namespace) -> None:
        """Look for the names and source texts of the host libraries that the package relies on."""
        from trl_drgrpo.upstream.kv_cache import check_decoding
        from trl_drgrpo.upstream.seams import check_upstream, vanished_texts
        from trl_drgrpo.upstream.versions import provenance, untested_versions

        command = "trl-drgrpo check"
        for name in ("full", "credit", "proof", "json"):
            if getattr(args, name):
                command += f" --{name}"
        # Problems by name; an empty text is none.
        seams = check_upstream()
        decoding = check_decoding()
        # A source text that has changed may compute the same: a proof decides, not the text.
        vanished = vanished_texts()
        self.has_moved = any(problem for name, problem in seams.items() if name not in vanished)
        self.is_slow = any(decoding.values())
        self.must_prove = bool(vanished or untested_versions())
        self.report = {
            **provenance(command),
            "seams": {name: problem or "ok" for name, problem in seams.items()},
            "decoding_seams": {name: problem or "ok" for name, problem in decoding.items()},
        }
        self._say(_versions(self.report))
        self._say("\nInternals of trl.GRPOTrainer that this package relies on")
        for name, problem in seams.items():
            who_decides = " (a proof decides)" if name in vanished else ""
            self._say_case(not problem, f"{name}{_after_colon(problem)}{who_decides}")
        expected = list(seams.values()).count("")
        self._say(f"  {expected} of {len(seams)} are as expected")
        for name, problem in decoding.items():
            self._say_case(not problem, f"{name} (generation in transformers){_after_colon(problem)}")

    def prove_hosts(self, make: bool) -> None:
        """Show the proof of the host libraries. It is made where none is kept for untested versions, or by `make`."""
        from trl_drgrpo.features.fast_path.speed import in_words
        from trl_drgrpo.host_proof.keeping import hosts, keep, kept_proof
        from trl_drgrpo.host_proof.proof import prove
        from trl_drgrpo.trainer import DrGRPOTrainer

        # A proof is kept for these versions, and training looks there first.
        if make or self.must_prove:
            proof = prove(DrGRPOTrainer, hosts())
            if not keep(proof):
                self._say("\nThe proof cannot be kept: set XDG_CACHE_HOME to a folder that can be written to.")
        else:
            proof = kept_proof()
        self.report["proof"] = proof and {**dataclasses.asdict(proof), "wrong": list(proof.wrong.values())}
        if proof is None:
            self._say_case(True, "these versions were tested: no proof is needed (--proof makes one)")
            return
        self.is_slow = self.is_slow or bool(proof.off)
        self.is_wrong = bool(proof.wrong)
        self._say(f"\nProof of these versions on a tiny model ({proof.seconds:.0f} s)")
        for name, difference in proof.differences.items():
            line = proof.wrong.get(name) or f"{difference:.1e}  {name}"
            self._say_case(name not in proof.wrong, line)
        largest = max(proof.differences.values())
        self._say(f"  gradients and merged adapters: largest difference {largest:.1e} from those of TRL and PEFT")
        self._say(f"  {proof.equal_tokens:.0%} of the completions are those of transformers' own loop")
        self._say(f"  fast path: {in_words(proof.parts)}")

    def compare_trainer(self, full: bool) -> None:
        """Compare loss and gradient of the trainer with the specification."""
        from trl_drgrpo.check import parity
        from trl_drgrpo.features.fast_path.speed import in_words

        self._say("\nLoss and gradient against the specification (|difference|, relative for the gradient)")
        if self.is_verbose:
            self._say(f"  {'':4} {'rows x accum / gen / iter':26} {'beta':>5} {'LoRA':>5} {'loss':>9} {'gradient':>9}")
        results = self._run_cases(map(parity.run_case, parity.cases(full)), _case, "gradient_difference")
        speed = _speed_of_tiny_model()
        self.report["cases"] = [_flat(result) for result in results]
        self.report["speed"] = speed
        self.is_slow = self.is_slow or _lacks_parts(speed)
        self._say(f"  fast path: {in_words(speed)}")
        self._say_case(not _lacks_parts(speed), "every part of the fast path that a CPU has")

    def compare_credit(self) -> None:
        """Compare the expected gradient of the credit, by enumeration, with the exact one."""
        from trl_drgrpo.check import credit

        self._say("\nExpected gradient of the credit, enumerated, against the exact one (|difference|, relative)")
        results = self._run_cases(map(credit.run_credit_case, credit.credit_cases()), _credit, "difference")
        self.report["credit"] = [vars(result) for result in results]

    def compare_loss_terms(self, terms: Sequence["LossTerm | type[LossTerm]"]) -> str:
        """Compare the gradient with loss terms in TRL's micro-batches and in others; return the verdict."""
        from trl_drgrpo.check.term_proof import check_loss_terms

        self._say("\nGradient with the loss terms, in TRL's micro-batches and in others (|difference|, relative)")
        results = self._run_cases(check_loss_terms(terms), _loss_term_case, "gradient_difference")
        self.report["loss_terms"] = [_flat(result) for result in results]
        return self.verdict(
            "rows may be skipped, regrouped and packed with these loss terms",
            "A term that depends on the rows beside a token needs micro_batching='upstream'. One with a loss where "
            "there is no advantage needs reads_all_rows = True. One that changes nothing is seen as well.",
        )

    def verdict(self, proven: str, remedy: str) -> str:
        """Say how many cases passed, and what that means."""
        failed = sum(not result.passed for result in self.results)
        if failed:
            return f"{failed} of {len(self.results)} cases FAILED: {remedy}"
        return f"{len(self.results)} of {len(self.results)} cases passed: {proven} here."

    def end(self, verdict: str) -> int:
        """Print the verdict, or the report as JSON; return the exit code."""
        if self.is_wrong:
            verdict = "A gradient or merged adapters are WRONG with these versions: training refuses to start."
        self._say(f"\n{verdict}")
        if self.is_slow:
            self._say("Generation or training is slower here than it need be; the lines above say why.")
        passed = all(result.passed for result in self.results)
        if self.has_moved or self.is_slow or self.is_wrong:
            passed = False
        if self.prints_json:
            print(json.dumps({**self.report, "passed": passed}, indent=2))
        return 0 if passed else 1

    def _say(self, text: str) -> None:
        if not self.prints_json:
            print(text, flush=True)

    def _say_case(self, passed: bool, text: str) -> None:
        mark = "ok  " if passed else "FAIL"
        if self.is_verbose or not passed:
            self._say(f"  {mark} {text}")

    def _run_cases(self, cases: Iterable[Any], line: Callable[[Any], str], difference: str) -> list[Any]:
        """Say each result as soon as it is there, then their summary; return them."""
        # Cases are run as they are asked for: some take seconds.
        results = []
        for result in cases:
            self._say_case(result.passed, line(result))
            results.append(result)
        # A control passes where it differs, so its difference says nothing of how exact the others are.
        exact = [result for result in results if not result.control]
        controls = [result for result in results if result.control]
        largest = max((getattr(result, difference) for result in exact), default=math.nan)
        self._say(f"  {_passed(exact)} agree, largest difference {largest:.1e}")
        self._say(f"  {_passed(controls)} controls differ (other objectives, published constructions), as they must")
        self.results += results
        return results


def _after_colon(problem: str) -> str:
    return f": {problem}" if problem else ""


def _versions(report: Mapping[str, Any]) -> str:
    versions = [f"{package} {number}" for package, number in report["versions"].items()]
    return "  ".join(versions)


def _flat(result: "CaseResult") -> dict[str, Any]:
    """Return the fields of a result and of its case as one mapping."""
    # The case itself is no JSON; its fields stand beside those of the result.
    fields = vars(result.case) | vars(result)
    del fields["case"]
    return fields


def _loss_term(path: str) -> Any:
    """Return the class, or object, of a loss term at `file.py:name` or `module.name`."""
    from trl_drgrpo.rewards.recipe_rewards import resolve_object
    from trl_drgrpo.upstream.hooks import LossTerm

    term = resolve_object(path, "loss_term")
    is_class = isinstance(term, type) and issubclass(term, LossTerm)
    if not (is_class or isinstance(term, LossTerm)):
        remedy = "Derive it from trl_drgrpo.LossTerm."
        raise InputError("loss_term", f"{path}, {shortened(term)}", "a LossTerm, or a class of them", remedy)
    return term


def _loss_term_case(result: "CaseResult") -> str:
    must = " (must differ)" if result.control else ""
    return f"{result.gradient_difference:9.1e}  {result.case.name}{must}"


def _lacks_parts(parts: Mapping[str, str]) -> bool:
    """Tell whether a part of the fast path is off that any machine has: all but recorded steps, which need CUDA."""
    return any(reason != "yes" and part != "recorded steps" for part, reason in parts.items())


def _speed_of_tiny_model() -> dict[str, str]:
    from trl_drgrpo.check.model import fast_path_of
    from trl_drgrpo.host_proof.tiny import tiny_model, tiny_tokenizer

    return fast_path_of(tiny_model(tiny_tokenizer()))


def _check_model(args: argparse.Namespace) -> int:
    """Print which parts of the fast path one model gets, as lines or as JSON. Exit code 1: its gradient or its tokens
    are wrong."""
    from trl_drgrpo.check.small import read_config
    from trl_drgrpo.cli.run_keys import model_path

    # The configuration may come from the Hub. Nothing behind it needs the network.
    config = read_config(model_path(args.model), args.trust_remote_code)
    stay_offline_and_quiet()
    from trl_drgrpo.check.model import check_model
    from trl_drgrpo.host_proof.comparison import TOLERANCE
    from trl_drgrpo.upstream.versions import provenance

    with proving(), _without_warnings():
        result = check_model(config, args.trust_remote_code)
    report = {**provenance("trl-drgrpo check --model"), "model": args.model, **vars(result), "passed": result.passed}
    if args.json:
        print(json.dumps(report, indent=2))
        return 0 if result.passed else 1
    print(_versions(report))
    print(f"\nThe fast path of {result.architecture}, made small, with random weights")
    for part, reason in {**result.parts, "plan": result.plan}.items():
        line = reason if reason == "yes" else f"no: {reason}"
        if part == "plan" and result.parameters is not None:
            line += f", {result.parameters / 1e9:.2f} billion weights"
        print(f"  {part:24} {line}")
    print(f"  gradient {result.gradient_difference:.1e} from that of TRL's micro-batches (at most {TOLERANCE:.0e})")
    print(f"  {result.equal_tokens:.0%} of the completions are those of transformers' own loop")
    if not result.passed:
        print("\nIts gradient or its tokens are WRONG here: set micro_batching='upstream', and report it.")
        return 1
    print("\nIts gradient and its tokens are right here.")
    return 0


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Let the libraries below log errors only."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(disabled)


def _case(result: "CaseResult") -> str:
    case = result.case
    geometry = f"{case.micro_batch} x {case.accumulation} / {case.steps_per_generation} / {case.num_iterations}"
    lora = "yes" if case.lora else "no"
    must = f" (must differ: cosine {result.cosine:.2f})" if case.control else ""
    differences = f"{result.loss_difference:9.1e} {result.gradient_difference:9.1e}"
    return f"{geometry:26} {case.beta:5g} {lora:>5} {differences}  {case.name}{must}"


def _credit(result: "CreditResult") -> str:
    must = " (must differ: what is left at the best learning rate)" if result.control else ""
    return f"{result.environment:26} {result.difference:9.1e}  {result.credit}{must}"


def _passed(results: Sequence[Any]) -> str:
    passed = sum(result.passed for result in results)
    return f"{passed} of {len(results)}"
