"""`trl-drgrpo eval`: pass@1 and pass@k of a model on a dataset with a reward, against the model it was trained from.

The table goes to standard output, progress to standard error, samples and results into files: of a run into its
`_drgrpo/evaluations`, where `trl-drgrpo report` finds them. Started again, it goes on. Exit codes: 0 done, 1 a reward
failed on some completion, 2 bad input.
"""

import argparse
import gc
import re
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trl_drgrpo.cli import console
from trl_drgrpo.cli.eval_inputs import (
    FOLDER,
    RULE_KEYS,
    baseline_of,
    check_rule,
    checked,
    facts_of,
    output_of,
    split_of,
)
from trl_drgrpo.cli.job import model_path
from trl_drgrpo.cli.problems import digest, prompt_rows
from trl_drgrpo.cli.progress_bar import progress_over
from trl_drgrpo.cli.run_keys import DECODING_KEYS, MODEL_KEYS, PROMPT_KEYS, TEMPLATE_KEY, Given, add_keys

_DATA_KEYS = ("dataset_name", "dataset_config", "rename_columns", "reward_funcs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options to a parser."""
    parser.description = (
        "Sample completions of a dataset's prompts, score them, and show pass@1 and pass@k with their intervals, "
        "beside the model that training began with and the paired difference. Started again, it goes on."
    )
    add_keys(parser, (*MODEL_KEYS, *_DATA_KEYS, *PROMPT_KEYS, TEMPLATE_KEY, *DECODING_KEYS, *RULE_KEYS))
    add = parser.add_argument
    add(
        "--vllm_server_base_url",
        metavar="URL",
        help="let a vLLM server sample, which serves the models under these names; that of a recipe is not asked",
    )
    add("--split", help="split to evaluate on (default: the recipe's test split, else test, else the only one)")
    add(
        "--baseline",
        metavar="MODEL",
        help="model to compare with, or none (default: the model of the run's recipe, else the adapter's base)",
    )
    add("--num_samples", type=int, default=1, help="completions of each prompt (default: 1)")
    add("--k", type=int, nargs="+", metavar="K", help="for pass@k (default: 1, and num_samples)")
    add("--limit", type=int, help="evaluate on the first prompts only")
    add("--seed", type=int, default=0, help="of the sampling (default: 0)")
    add("--batch_size", type=int, default=64, help="completions per forward, or requests at a time (default: 64)")
    add("--output_dir", help=f"folder for samples and results (default: in the run's folder, else {FOLDER})")
    add("--markdown", action="store_true", help="write the table as Markdown, too")
    add("--pass_rates", metavar="FILE", help="write the pass rate of each prompt, for prior_pass_rates in a recipe")
    add("--no_card", action="store_true", help="leave the model's card as it is")
    add("--json", action="store_true", help="print the results as JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Evaluate, print and write."""
    given = checked(args)
    from trl_drgrpo.evaluation import results, table
    from trl_drgrpo.evaluation.running import check_rows
    from trl_drgrpo.rewards.contract import reward_name
    from trl_drgrpo.rewards.registry import resolve_reward

    names = {"model": given.values["model_name_or_path"]}
    if baseline := baseline_of(args, given):
        names = {"baseline": baseline, **names}
    output = output_of(args, given)
    with console.stdout_to_stderr():
        rewards = {reward_name(reward): reward for reward in map(resolve_reward, given.values["reward_funcs"])}
        check_rule(given, list(rewards))
        split, dataset = split_of(args, given)
        rows = prompt_rows(
            dataset,
            given.values["dataset_name"],
            [(name, reward, ()) for name, reward in rewards.items()],
            renamings=given.values.get("rename_columns") or (),
            limit=args.limit,
            **{key: given.values.get(key) for key in PROMPT_KEYS},
        )
        check_rows(rows)
        facts = facts_of(args, given, split, rows)
        try:
            files = {role: _samples(args, given, name, rows, rewards, output, facts) for role, name in names.items()}
        except KeyboardInterrupt:
            console.log("The samples so far are kept: the same command goes on.")
            raise
    content = _content(args, given, names, files, list(rewards), facts)
    path = _path(output, facts, given, names)
    results.write_results(path, content)
    if args.markdown:
        path.with_suffix(".md").write_text(table.markdown(content), encoding="utf-8")
    print(results.as_json(content) if args.json else table.plain_text(content), end="")
    console.log(f"Written: {path}; samples: {files['model'].path}")
    if args.pass_rates:
        _write_pass_rates(args, given, files["model"].rows, list(rewards))
    if not args.no_card:
        _put_into_card(given, output, content)
    failed = sum(model["failed"] for model in content["models"])
    if failed:
        where = files["model"].path.parent
        console.log(f"A reward failed on {failed} completions, which count as unscorable: see `failures` in {where}.")
    return int(failed > 0)


# Samples and numbers -------------------------------------------------------------------------------------------------


def _samples(
    args: argparse.Namespace,
    given: Given,
    name: str,
    rows: list[dict[str, Any]],
    rewards: dict[str, Any],
    output: Path,
    facts: dict[str, Any],
) -> Any:
    """The file of a model's samples, complete."""
    from trl_drgrpo.evaluation import models
    from trl_drgrpo.evaluation.results import judged
    from trl_drgrpo.evaluation.running import KIND, sample_and_score
    from trl_drgrpo.evaluation.sampling import ModelSampler, check_context, server_sampler
    from trl_drgrpo.process_rewards.texts import prompt_ids
    from trl_drgrpo.search.output import SearchFile

    group = max(1, args.batch_size // args.num_samples)
    path = model_path(name)
    specs = [str(spec) for spec in given.values["reward_funcs"]]
    loading, url = given.loading(args.base), args.vllm_server_base_url
    depends = {**facts, "rewards": specs, "model": name, "weights": models.weights_mark(path), "batch": group}
    depends |= {"loading": asdict(loading), "server": url is not None}
    file = SearchFile(output / "samples" / f"{_slug(name)}-{digest(depends)}.jsonl", depends, group, KIND)
    file.open(len(rows))
    if file.done:
        console.log(f"{file.done} of {len(rows)} prompts of {name} are in {file.path} already.")
    if file.done == len(rows):
        return file
    tokenizer = models.load_tokenizer(path, loading)
    model = sampler = None
    if url is None:
        console.log(f"Loading {name}")
        model = models.load_model(path, loading)
        lengths = [len(prompt_ids(row["prompt"], tokenizer, given.template())) for row in rows]
        check_context(model, lengths, given.decoding())
        sampler = ModelSampler(model, tokenizer, given.decoding(), args.batch_size)
    else:
        sampler = server_sampler(url, name, tokenizer, given.decoding(), args.batch_size)
    passed: list[float] = []
    first = given.values.get("correct_reward") or next(iter(rewards))
    with progress_over(len(rows), file.done, f"sampling {_slug(name)}", "prompts") as show:

        def tell(of_prompt: list[dict[str, Any]]) -> None:
            judged(of_prompt, list(rewards), *(given.values.get(key) for key in RULE_KEYS))  # refused here, not last
            found = [row[KIND]["rewards"][first] for row in of_prompt]
            passed.extend(value for value in found if value is not None)
            show(f"{first} {sum(passed) / len(passed):.3g}" if passed else "")

        sample_and_score(
            rows,
            sampler,
            tokenizer,
            rewards,
            file,
            samples=args.num_samples,
            length=given.decoding().max_completion_length,
            seed=args.seed,
            template=given.template(),
            tell=tell,
        )
    del model, sampler
    gc.collect()  # the next model needs the room
    return file


def _content(
    args: argparse.Namespace,
    given: Given,
    names: dict[str, str],
    files: dict[str, Any],
    rewards: list[str],
    facts: dict[str, Any],
) -> dict[str, Any]:
    from trl_drgrpo.evaluation import models, results
    from trl_drgrpo.labs.provenance import provenance

    rule = {key: given.values.get(key) for key in RULE_KEYS}
    correct = {role: results.judged(file.rows, rewards, *rule.values()) for role, file in files.items()}
    found = []
    for role, name in names.items():
        numbers = results.model_numbers(files[role].rows, correct[role], args.k)
        found.append({"role": role, "name": name, "weights": models.weights_mark(model_path(name)), **numbers})
    difference = None
    if "baseline" in files:
        pair = [each for role in ("model", "baseline") for each in (files[role].rows, correct[role])]
        difference = results.differences(*pair, args.k)
    about = provenance(shlex.join(["trl-drgrpo", *sys.argv[1:]]) if sys.argv[1:2] == ["eval"] else "trl-drgrpo eval")
    how = {"reward": rule["correct_reward"] or rewards[0], "threshold": rule["correct_threshold"]}
    return results.results({**about, **facts, "correct": how}, found, difference)


def _path(output: Path, facts: dict[str, Any], given: Given, names: dict[str, str]) -> Path:
    rule = {key: given.values.get(key) for key in RULE_KEYS}
    mark = digest({**facts, **rule, **names, "rewards": given.values["reward_funcs"]})[:8]
    return output / f"{_slug(facts['dataset']['name'])}-{facts['dataset']['split']}-{mark}.json"


def _slug(name: str) -> str:
    """The end of a name as part of a file's name."""
    last = name.partition("?")[0].rstrip("/").rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9.]+", "-", last).strip("-.").removesuffix(".jsonl")[:40] or "data"


# Readers of the result -----------------------------------------------------------------------------------------------


def _write_pass_rates(args: argparse.Namespace, given: Given, rows: list[dict[str, Any]], rewards: list[str]) -> None:
    from trl_drgrpo.evaluation.results import judged
    from trl_drgrpo.features.sampling.pass_rates import write_pass_rates

    correct = judged(rows, rewards, *(given.values.get(key) for key in RULE_KEYS))
    path = Path(args.pass_rates)
    path.parent.mkdir(parents=True, exist_ok=True)
    written, unjudged = write_pass_rates(path, [row["prompt"] for row in rows], correct)
    left_out = f"; {unjudged} without a score are left out" if unjudged else ""
    console.log(f"Pass rates of {written} prompts: {path}{left_out}")


def _put_into_card(given: Given, output: Path, content: dict[str, Any]) -> None:
    """The evaluations of these weights, all that the folder holds."""
    from trl_drgrpo.evaluation.card import put_into_card
    from trl_drgrpo.evaluation.results import read_results

    readme = Path(given.model) / "README.md"
    if not readme.is_file():
        return
    mark = content["models"][-1]["weights"]
    same = [each for each in read_results(output) if each["models"][-1].get("weights") == mark]
    try:
        put_into_card(readme, same)
    except (OSError, ValueError) as error:  # a card is somebody's text: the numbers are written all the same
        console.log(f"{readme} stays as it is: {type(error).__name__}: {error}")
        return
    console.log(f"Stated in the model card: {readme}")
