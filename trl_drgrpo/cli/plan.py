"""`trl-drgrpo plan --model NAME_OR_PATH --device L4 [...]`: will it fit, and what would.

Reads the model's configuration and nothing else of it: no weights, no data, no TRL. stdout has a recipe fragment with
settings that fit (its comments say what they were planned for) or, with `--json`, everything; the table of components
goes to stderr. With `--probe` two real steps are run as well. Exit code 1: nothing fits, or the probe has run out of
memory.

Example:

  trl-drgrpo plan --model_name_or_path Qwen/Qwen2.5-7B --device L4 --preset qlora >> recipe.yaml

A folder with nothing but config.json is enough for a model. Settings that are given, here or in --config, stay as they
are; batch sizes and completion length are proposed otherwise.
"""

import argparse
import gc
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import yaml

from trl_drgrpo.cli import console
from trl_drgrpo.cli.flags import read_flags
from trl_drgrpo.cli.recipe import read_given
from trl_drgrpo.cli.values import add_flag
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.ranges import refuse_outside, whole
from trl_drgrpo.single_gpu.lora_presets import PRESETS, preset_values
from trl_drgrpo.single_gpu.memory.memory_settings import (
    FIELD_KEYS,
    find_card,
    from_keys,
    parse_margin,
    parse_memory,
    readable,
)

if TYPE_CHECKING:
    from trl_drgrpo.cli.plan_probe import Probe
    from trl_drgrpo.single_gpu.memory.estimate import Proposal

Phases = Mapping[str, Mapping[str, int]]  # bytes, by phase and part


@dataclass(frozen=True)
class PlanReport:
    """A plan with what it was made for.

    Args:
        name (`str`): The model.
        card (`str`, *optional*): The device, where it was named.
        memory, margin (`int`): Bytes of the device, and how many of them stay free.
        proposal ([`Proposal`]): The settings.
        host (`dict[str, dict[str, int]]`): Bytes of the host's memory, by phase and part.
        recipe (`dict[str, Any]`): The settings with the given ones, as recipe keys.
        probe ([`Probe`], *optional*): What real steps took.
    """

    name: str
    card: str | None
    memory: int
    margin: int
    proposal: "Proposal"
    host: Phases
    recipe: dict[str, Any]
    probe: "Probe | None" = None

    @property
    def room(self) -> str:
        """The device in words."""
        card = f"{self.card}, " if self.card else ""
        return f"{card}{readable(self.memory)} less a margin of {readable(self.margin)}"

    def table(self) -> str:
        """Components down, phases across, of the device and of the host; the phase that decides is marked."""
        estimate = self.proposal.estimate
        counts = f"{estimate.parameters / 1e9:.2f} billion parameters, {estimate.trained / 1e6:.1f} million trained"
        device = {f"{name}{'*' * (name == estimate.peak)}": parts for name, parts in estimate.phases.items()}
        lines = [*_lines("on the device", device), *(_lines("on the host", self.host) if self.host else ())]
        return "\n".join([f"{self.name}: {counts}", *lines, self.verdict()])

    def verdict(self) -> str:
        """Whether it fits, by how much, and what decides."""
        estimate = self.proposal.estimate
        size, largest = max((size, part) for part, size in estimate.phases[estimate.peak].items())
        decides = f"Most of it in {estimate.peak}: {largest}, {readable(size)}."
        if self.proposal.fits:
            return f"Fits {self.room}: the peak is {readable(estimate.total)}. {decides}"
        least, more = readable(estimate.total), readable(estimate.total - (self.memory - self.margin))
        return f"Does not fit {self.room}: the smallest settings tried need {least}, {more} more. {decides}"

    def as_yaml(self) -> str:
        """A recipe fragment; comments say what it was planned for. Where nothing fits, it is commented out."""
        estimate = self.proposal.estimate
        text = (
            f"# {self.name} on {self.room}: planned peak {readable(estimate.total)}, prompts up to "
            f"{estimate.setup.prompt} tokens. An estimate, not a measurement.\n"
        )
        body = yaml.safe_dump(self.recipe, sort_keys=False)
        if self.proposal.fits:
            return text + body
        commented = "".join(f"# {line}\n" for line in body.splitlines())
        return f"{text}# Nothing fits. The smallest settings tried:\n{commented}"

    def as_json(self) -> dict[str, Any]:
        """Everything, bytes as whole numbers."""
        estimate = self.proposal.estimate
        return {
            "model": self.name,
            "device": self.card,
            "memory": self.memory,
            "margin": self.margin,
            "fits": self.proposal.fits,
            "peak": estimate.total,
            "peak_phase": estimate.peak,
            "parameters": estimate.parameters,
            "trained_parameters": estimate.trained,
            "prompt_tokens": estimate.setup.prompt,
            "phases": _with_totals(estimate.phases),
            "host": _with_totals(self.host),
            "recipe": self.recipe,
            **({"probe": asdict(self.probe)} if self.probe else {}),
        }


def _with_totals(phases: Phases) -> dict[str, dict[str, int]]:
    return {name: {**parts, "total": sum(parts.values())} for name, parts in phases.items()}


def _lines(title: str, phases: Phases) -> list[str]:
    parts = dict.fromkeys(part for phase in phases.values() for part in phase)
    lines = [f"{title:32}" + "".join(f"{name:>11}" for name in phases)]
    for part in parts:
        cells = (readable(phase[part]) if part in phase else "-" for phase in phases.values())
        lines.append(f"{part:32}" + "".join(f"{cell:>11}" for cell in cells))
    return [*lines, f"{'total':32}" + "".join(f"{readable(sum(p.values())):>11}" for p in phases.values())]


# Keys of a recipe that decide its memory; a recipe may hold any other key as well.
KEYS = (
    *("use_peft", "lora_r", "lora_dropout", "lora_target_modules", "load_in_4bit", "load_in_8bit", "dtype", "bf16"),
    *("fp16", "beta", "generation_batch_size", "micro_batching", "use_vllm", "vllm_mode", *FIELD_KEYS.values()),
)
DEFAULT_PROMPT = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments."""
    parser.usage = (
        f"{parser.prog} --model_name_or_path NAME --memory 24GB [--device L4] [--preset qlora] [--flag value ...]"
    )
    console.add_model(parser, "Folder with config.json, or Hub id. Default: the recipe's.", metavar="MODEL")
    add = parser.add_argument
    add("--memory", metavar="SIZE", help="Memory of one device, such as 24GB; a plain number is GB.")
    margin = "Memory to leave free: an amount, or a share such as 5%% (default: 5%% or 0.7 GB, whichever is more)."
    add("--margin", metavar="SIZE", help=margin)
    preset = "As in `train`; full: train all weights, even if the recipe has a preset."
    add("--preset", choices=("full", *PRESETS), dest="planned_preset", help=preset)
    length = f"Longest prompt of the data, in tokens (default: {DEFAULT_PROMPT})."
    spellings = ("--max_prompt_length", "--max-prompt-length")
    add(*spellings, type=int, metavar="TOKENS", help=length)
    device = "A card, such as T4, which also sets --memory, or cuda or cpu (default: cuda)."
    add("--device", default="cuda", help=device)
    probe = "Run two real steps here at full size, with random weights where there are none, and report their peak."
    add("--probe", action="store_true", help=probe)
    add("--json", action="store_true", help="Print the plan as JSON.")
    add("--config", metavar="YAML", help="A recipe; flags win over it.")
    group = parser.add_argument_group("settings of the run, as in `trl-drgrpo train`")
    flags = read_flags()
    for name in KEYS:
        if name in flags:
            add_flag(group, flags[name])


def run(args: argparse.Namespace) -> int:
    """Plan and print; 1 when nothing fits."""
    device, card, size = args.device.lower(), None, None
    if device not in ("cuda", "cpu"):
        device, (card, size) = "cuda", find_card(args.device)
    memory = parse_memory(args.memory) if args.memory is not None else size
    if memory is None:
        remedy = "Set the memory of one device, or its name: --device T4."
        raise InputError("--memory", "none", "an amount such as 24GB", remedy)
    margin = parse_margin(args.margin, memory)
    longest = whole(1, optional=True, remedy="Set the longest prompt's length.")
    refuse_outside("--max_prompt_length", args.max_prompt_length, longest)
    given = read_given(args)
    name = args.model or given.get("model_name_or_path")
    if not name:
        remedy = "Set it, or a --config that does."
        raise InputError("--model_name_or_path", "none", "a model's folder or Hub id", remedy)
    preset = args.planned_preset or given.get("preset")
    added = {} if preset in (None, "full") else preset_values(preset, given, device)
    setup = from_keys({**added, **given}, DEFAULT_PROMPT, device)  # judges numbers, loads nothing heavy
    from trl_drgrpo.cli.job import model_path

    # Thousands of modules are imported, none of them garbage, and steps are run on them: without collection it takes a
    # sixth of the first time less, and a third of the second.
    gc.disable()
    try:
        from trl_drgrpo.single_gpu.memory import Planner, propose, read_config

        config, is_part = read_config(model_path(name))
        setup = replace(setup, prompt=_longest_prompt(config, args.max_prompt_length, given))
        planner = Planner(config, setup, memory)
        proposal = propose(planner, setup, memory - margin, given)
    finally:
        gc.enable()
    recipe = {**added, **{key: given[key] for key in KEYS if key in given}, **proposal.keys}
    if {"steps_per_generation", "generation_batch_size"} <= set(recipe):
        del recipe["steps_per_generation"]  # TRL takes one of them
    probe = None
    if args.probe:
        from trl_drgrpo.cli.plan_probe import run_probe

        probe = run_probe(model_path(name), recipe, device, setup.prompt)
    report = PlanReport(name, card, memory, margin, proposal, planner.host(), recipe, probe)
    if args.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        print(report.table(), file=sys.stderr)
        print(report.as_yaml(), end="", flush=True)
    if is_part:
        console.log(f"{name} has several parts: its text model alone is planned, images and sound come on top.")
    if probe:
        console.log(probe.sentence(recipe, proposal.estimate))
    return 0 if proposal.fits and not (probe and probe.ended_in) else 1


def _longest_prompt(config: Any, tokens: int | None, given: Mapping[str, Any]) -> int:
    """Tokens of the longest prompt: as given, else 512 or what the model's context leaves. Says where the context is
    too short for the usual completion; refuses what was given and is longer."""
    from trl_drgrpo.single_gpu.memory.estimate import LENGTHS
    from trl_drgrpo.single_gpu.memory.meta_model import context_length

    context, completion = context_length(config), given.get("max_completion_length")
    if context is None:
        return tokens or DEFAULT_PROMPT
    prompt = tokens or max(1, min(DEFAULT_PROMPT, context - (completion or context // 2)))
    if prompt + (completion or 1) > context:
        field = "max_completion_length" if completion else "--max_prompt_length"
        got = f"{completion} after a prompt of {prompt} tokens" if completion else str(prompt)
        expected = f"at most {context} tokens together, the model's context"
        raise InputError(field, got, expected, "Lower the one or the other.")
    if completion is None and context - prompt < LENGTHS[0]:
        left = f"leaves at most {context - prompt} for a completion behind prompts of {prompt}"
        console.log(f"max_completion_length: the model's context of {context} tokens {left}.")
    return prompt
