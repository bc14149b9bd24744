r"""`math_reward` beside TRL's `accuracy_reward` on real gold answers: who is right, and what a call costs.

Right: every gold answer of the two sets is written in equivalent ways (which have to score 1) and perturbed (which has
to score 0). A table counts both rewards' mistakes by kind; ours are listed one by one.

Cost: 1,000 samples per round, groups of 8, half of them right; the two rewards take turns on the same samples, each
round has problems of its own so that no cache carries over, and the first one is not counted. CPU time includes the
worker processes. `--adversarial` replaces 1% of the samples by such as `9^{9^{9}}`.

Run: `python tests/benchmarks/math_rewards.py --data DIR`, a folder with `math500.jsonl` and `gsm8k_train.jsonl`
(columns `problem`, `answer`). About ten minutes; `--limit 300` takes one.
"""

import argparse
import contextlib
import json
import logging
import random
import re
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path

import psutil
from bench import interleaved, ratio
from trl.rewards import accuracy_reward

from trl_drgrpo.rewards.functions.mathematics import MathReward

FRACTION = re.compile(r"\\d?frac\s*(\{-?\d+\}|\d)\s*(\{\d+\}|\d)")
LETTER = re.compile(r"(?<![\\a-zA-Z{])([a-zA-Z])(?![a-zA-Z])")
HOSTILE = ["9^{9^{9}}", "10^{10^{10}}", "9999999!", "{" * 500 + "1" + "}" * 500, "{" * 100_000, "((((9^9)^9)^9)^9)^9"]


# Equivalent answers -------------------------------------------------------------------------------------------------


def rewrites(gold):
    """Pairs of a kind and an answer that says the same."""
    yield "itself", gold
    yield from fraction_forms(gold)
    yield from spacings(gold)
    yield from wrappers(gold)
    yield from number_forms(gold)
    yield from orders(gold)


def fraction_forms(gold):
    for macro in (r"\dfrac", r"\tfrac", r"\frac"):
        if "frac" in gold:
            changed = re.sub(r"\\d?frac", lambda m, macro=macro: macro, gold)
            if changed != gold:
                yield "fraction macro", changed
    braced = FRACTION.sub(lambda m: rf"\frac{{{m[1].strip('{}')}}}{{{m[2].strip('{}')}}}", gold)
    if braced != gold:
        yield "fraction braces", braced
    short = re.sub(r"\\frac\{(\d)\}\{(\d)\}", r"\\frac\1\2", gold)
    if short != gold:
        yield "fraction braces", short
        yield "fraction braces", re.sub(r"\\frac\{(\d)\}\{(\d)\}", r"\\frac \1 \2", gold)
    if whole := re.fullmatch(r"(-?)\\d?frac\{(\d+)\}\{(\d+)\}", gold):
        yield "fraction slash", f"{whole[1]}{whole[2]}/{whole[3]}"
        yield "fraction sign", rf"\frac{{{whole[1]}{whole[2]}}}{{{whole[3]}}}"
        value = Fraction(int(whole[2]), int(whole[3]))
        if 10**6 % value.denominator == 0:
            yield "decimal", f"{whole[1]}{float(value)}"


def spacings(gold):
    tight = re.sub(r"(\\[a-zA-Z]+) (?=[^a-zA-Z])|(?<!\\) (?=\W)|(?<=\W)(?<!\\) ", lambda m: m[1] or "", gold)
    if tight != gold and "text" not in gold and "mbox" not in gold:
        yield "spacing", tight
    if "," in gold and not re.search(r"\d,(?:\\!\s*)?\d{3}", gold):
        yield "spacing", gold.replace(",", r",\,")
        yield "spacing", gold.replace(",", ", ")
    if re.search(r"\w [+-] \w", gold):
        yield "spacing", re.sub(r" ([+-]) ", r"\1", gold)
    bare = gold.replace(r"\left", "").replace(r"\right", "")
    if bare != gold:
        yield "left and right", bare
    if re.search(r"(?<!\\)[(\[]", bare) and "text" not in bare:
        yield "left and right", re.sub(r"[)\]]", r"\\right\g<0>", re.sub(r"[(\[]", r"\\left\g<0>", bare))


def wrappers(gold):
    yield "dollar signs", f"${gold}$"
    if inner := re.fullmatch(r"\\text\{(.*)\}", gold):
        yield "text", inner[1]
        yield "text", rf"\textbf{{{inner[1]}}}"
        yield "text", rf"\mathrm{{{inner[1]}}}"
    elif re.fullmatch(r"-?[\d.]+", gold):
        yield "text", rf"\text{{{gold}}}"
    if r"^\circ" in gold:
        for sign in (r"^{\circ}", "°", r"\text{ degrees}", " degrees", ""):
            yield "degree sign", gold.replace(r"^\circ", sign)
    if gold.startswith(r"\$"):
        yield "currency", gold[2:]
        yield "currency", gold[2:] + r"\text{ dollars}"


def number_forms(gold):
    plain = re.sub(r",(\\!)?\s*", "", gold)
    if not re.fullmatch(r"\d+", plain) or re.search(r",(?!\\!)\s", gold):
        return
    value = int(plain)
    if value >= 1000:
        yield "thousands", f"{value:,}"
        yield "thousands", f"{value:,}".replace(",", r",\!")
        yield "thousands", f"{value:,}".replace(",", "{,}")
        yield "thousands", str(value)
    yield "decimal", f"{value}.0"
    yield "currency", rf"\${value}"
    yield "percent", rf"{value}\%" if value else "0"
    yield "unit", rf"{value} \text{{ apples}}"
    yield "assignment", f"x = {value}"
    yield "arithmetic", rf"\frac{{{2 * value}}}{{2}}"


def orders(gold):
    if re.fullmatch(r"-?\w+(,\s*-?\w+)+", gold) and not re.search(r"\d,\d{3}", gold):
        entries = [entry.strip() for entry in gold.split(",")]
        yield "order", ", ".join(reversed(entries))
        yield "order", rf"\{{{', '.join(entries)}\}}"
        yield "order", r" \text{ and } ".join(entries)
    if r"\cup" in gold:
        yield "order", r"\cup".join(reversed(gold.split(r"\cup")))
    if (whole := re.fullmatch(r"([^,]*)\\pm([^,]*)", gold)) and "frac" not in gold:
        yield "order", f"{whole[1]}-{whole[2]}, {whole[1]}+{whole[2]}"
    terms = gold.split("+")
    if len(terms) > 1 and not re.search(r"[-=(,]|\\text|frac", gold):
        yield "order", "+".join(reversed(terms))


# Wrong answers ------------------------------------------------------------------------------------------------------


def perturbations(gold):
    """Pairs of a kind and an answer that says something else."""
    runs = list(re.finditer(r"\d+", gold))
    for kind, run in zip(("first number + 1", "last number + 1"), (runs[:1] + runs[-1:]), strict=False):
        raised = str(int(run[0]) + 1).zfill(len(run[0]))
        yield kind, gold[: run.start()] + raised + gold[run.end() :]
    scalar = not re.search(r"[=,]|\\in|\\text|\\mbox|\\pm|_|pmatrix|\\\$", gold) and gold != "0"
    if scalar and re.fullmatch(r"-[^+-]*", gold):
        yield "sign", gold[1:]
    elif scalar:
        yield "sign", f"-({gold})" if re.search(r"[+-]", gold) else f"-{gold}"
    pair = re.fullmatch(r"(?:\\left)?\(([^,]*),([^,]*?)(?:\\right)?\)", gold)
    if pair and pair[1].strip() != pair[2].strip():
        yield "swapped", f"({pair[2]},{pair[1]})"
        yield "bracket", f"[{pair[1]},{pair[2]})"
    if LETTER.search(gold) and "text" not in gold and "mbox" not in gold and "matrix" not in gold:
        yield "letter", LETTER.sub("w", gold)
        if not re.search(r"(?<![\\a-z])i(?![a-z])", gold):  # I is the imaginary unit too
            yield "letter", LETTER.sub(lambda m: m[1].swapcase(), gold)
    for old, new in ((r"^\circ", r"\%"), ("cm", "m"), ("inches", "feet"), (" cents", " dollars"), (r"\$", "€")):
        if old in gold:
            yield "unit", gold.replace(old, new)
    if word := re.fullmatch(r"\\text\{([A-Za-z]+)\}", gold):
        yield "word", rf"\text{{not {word[1]}}}"
        yield "word", r"\text{Zelda}"
    if choice := re.fullmatch(r"\\text\{\(([A-Z])\)\}", gold):
        yield "word", rf"\text{{({chr(ord(choice[1]) + 1)})}}"
    if re.fullmatch(r"[1-9]\d*", gold):
        yield "magnitude", gold + "0"
        yield "magnitude", gold + ".5"
        yield "list", f"{gold}, {int(gold) + 1}"


# Correctness --------------------------------------------------------------------------------------------------------


def correctness(golds, ours):
    cases = []
    for gold in golds:
        cases += [(1.0, kind, gold, answer) for kind, answer in rewrites(gold)]
        cases += [(0.0, kind, gold, answer) for kind, answer in perturbations(gold)]
    completions = [message(f"We get \\boxed{{{answer}}}.") for _, _, _, answer in cases]
    solutions = [rf"$\boxed{{{gold}}}$" for _, _, gold, _ in cases]
    mine = ours(completions=completions, solution=solutions)
    theirs = accuracy_reward(completions, solutions)
    total, own_errors, their_errors = Counter(), Counter(), Counter()
    for (due, kind, gold, answer), own, other in zip(cases, mine, theirs, strict=True):
        key = (due, kind)
        total[key] += 1
        own_errors[key] += own != due
        their_errors[key] += other != due
        if own != due:
            print(f"  math_reward {own}, due {due} ({kind}): gold {gold!r}, answer {answer!r}")
    print(f"{'due':>4} {'kind':<18} {'cases':>7} {'errors: math_reward':>19} {'accuracy_reward':>16}")
    for key in sorted(total, reverse=True):
        print(f"{key[0]:>4.0f} {key[1]:<18} {total[key]:>7} {own_errors[key]:>19} {their_errors[key]:>16}")
    counts = [sum(counter.values()) for counter in (total, own_errors, their_errors)]
    print(f"{'all':>4} {'':<18} {counts[0]:>7} {counts[1]:>19} {counts[2]:>16}")


def message(text):
    return [{"role": "assistant", "content": text}]


# Cost ---------------------------------------------------------------------------------------------------------------


def samples(rows, rng, hostile_share):
    """Groups of 8 completions per problem, four of them right."""
    completions, solutions = [], []
    for row in rows:
        correct, incorrect = list(rewrites(row["answer"])), list(perturbations(row["answer"])) or [("", "0")]
        for index in range(8):
            answer = rng.choice(correct if index % 2 else incorrect)[1]
            if rng.random() < hostile_share:
                answer = rng.choice(HOSTILE)
            reasoning = f"{row['problem']} Let us think step by step. {row['problem']}"
            completions.append(message(f"{reasoning}\nSo the answer is $\\boxed{{{answer}}}$."))
            solutions.append(rf"$\boxed{{{row['answer']}}}$")
    return completions, solutions


def cpu_seconds():
    """CPU seconds of this process and of its descendants, those that ended included."""
    own, total = psutil.Process(), 0.0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has just ended
            total += sum(process.cpu_times()[:4])
    return total


def cost(math_rows, gsm_rows, ours, rounds, hostile_share):
    rng = random.Random(0)
    rng.shuffle(math_rows)
    rng.shuffle(gsm_rows)
    batches = [
        samples(math_rows[index * 63 : (index + 1) * 63] + gsm_rows[index * 62 : (index + 1) * 62], rng, hostile_share)
        for index in range(rounds + 1)
    ]

    def timed(reward):
        remaining = iter(batches)

        def run():
            completions, solutions = next(remaining)
            wall, cpu = time.perf_counter(), cpu_seconds()
            rewards = reward(completions=completions, solution=solutions)
            return time.perf_counter() - wall, cpu_seconds() - cpu, sum(each is None for each in rewards)

        return run

    mine, theirs = (list(zip(*rows, strict=True)) for rows in interleaved(rounds, timed(ours), timed(accuracy_reward)))
    for name, own, other in zip(("wall-clock", "CPU"), mine, theirs, strict=False):
        print(f"{name}: math_reward {own[0]:.2f} s, accuracy_reward takes {ratio(other, own)} as long")
    print(f"None: {sum(mine[2])}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path, help="folder with math500.jsonl and gsm8k_train.jsonl")
    parser.add_argument("--limit", type=int, help="at most so many gold answers of each set")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of 1,000 samples; 0: no timing")
    parser.add_argument("--adversarial", action="store_true", help="1%% hostile samples in the timing")
    parser.add_argument("--skip-correctness", action="store_true")
    arguments = parser.parse_args()
    for logger in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)  # accuracy_reward logs each completion that times out
    ours = MathReward()
    sets = {}
    for name in ("math500", "gsm8k_train"):
        with open(arguments.data / f"{name}.jsonl", encoding="utf-8") as lines:
            sets[name] = [json.loads(line) for line in lines]
    if arguments.rounds:  # first, while no cache knows the answers
        share = 0.01 if arguments.adversarial else 0.0
        cost(list(sets["math500"]), list(sets["gsm8k_train"]), ours, arguments.rounds, share)
    if not arguments.skip_correctness:
        for name, rows in sets.items():
            print(f"{name}: {len(rows)} gold answers")
            distinct = list(dict.fromkeys(str(row["answer"]) for row in rows))
            correctness(distinct[: arguments.limit], ours)


if __name__ == "__main__":
    main()
