"""Table of families of models: what `trl-drgrpo check --model` says of each, on the page `families.md`.

Each family is a `config.json` with the fields that decide which parts of the fast path it gets; the others are the
defaults of transformers, of full size. `check` makes each small by itself. `make families` runs them all in about two
minutes and writes `recipes/results/families.json` and the table.

    python recipes/studies/families.py [NAME ...]
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the libraries are imported

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from trl_drgrpo.check.model import check_model
from trl_drgrpo.check.small import read_config
from trl_drgrpo.upstream.versions import provenance

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "recipes" / "results" / "families.json"
PAGE = ROOT / "recipes" / "studies" / "families.md"
HEAD_WIDTH = {"head_dim": 128}
GATED_DELTA = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
SHORT_CONVOLUTIONS = ["conv", "conv", "full_attention", "conv"]

# By the name on the page: the type, and the fields that are not the defaults of its class.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3": ("qwen3", {}),
    "SmolLM3": ("smollm3", {}),
    "GLM-4": ("glm4", {}),
    "Phi-4": ("phi3", {"sliding_window": None}),
    "Mistral": ("mistral", {"sliding_window": None}),
    "Mistral, window": ("mistral", {"sliding_window": 4096}),
    "Ministral": ("ministral", HEAD_WIDTH),
    "Ministral 3": ("ministral3", {}),
    "HunYuan": ("hunyuan_v1_dense", HEAD_WIDTH),
    "Gemma 3": ("gemma3_text", {}),
    "Gemma 4": ("gemma4_text", {}),
    "Gemma 4, shared keys and values": ("gemma4_text", {"num_kv_shared_layers": 10}),
    "OLMo 3": ("olmo3", {}),
    "Cohere2": ("cohere2", {}),
    "EXAONE 4": ("exaone4", {}),
    "GPT-OSS": ("gpt_oss", {}),
    "OLMoE": ("olmoe", {}),
    "MiniMax-M2": ("minimax_m2", {}),
    "GLM-4-MoE": ("glm4_moe", {}),
    "DeepSeek-V3": ("deepseek_v3", {}),
    "GLM-4-MoE-lite": ("glm4_moe_lite", {}),
    "DeepSeek-V3.2": ("deepseek_v32", {}),
    "GLM-DSA": ("glm_moe_dsa", {}),
    "Qwen3.5": ("qwen3_5_text", {"num_hidden_layers": 32, "layer_types": 8 * GATED_DELTA}),
    "Qwen3-Next": ("qwen3_next", {}),
    "OLMo-hybrid": ("olmo_hybrid", {}),
    "LFM2": ("lfm2", {"num_hidden_layers": 16, "layer_types": 4 * SHORT_CONVOLUTIONS}),
    "Jamba": ("jamba", {}),
    "Nemotron-H": ("nemotron_h", {}),
    "Falcon-H1": ("falcon_h1", {}),
    "Qwen3.5, multimodal": ("qwen3_5", {}),
    "Gemma 3, multimodal": ("gemma3", {}),
    "Gemma 4, multimodal": ("gemma4", {}),
    "Mistral 3, multimodal": ("mistral3", {}),
    # From transformers' newest list.
    "LFM3": ("lfm3", {}),
    "Kimi Linear": ("kimi_linear", {}),
    "Beam": ("beam", {}),
    "Bailing hybrid": ("bailing_hybrid", {}),
    "Dory": ("dory", {}),
    "Lara mini": ("lara_mini", {}),
    "Sarvam MLA": ("sarvam_mla", {}),
}
# Whole models by their class in config.json, as they are published.
CLASSES = {
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
}
COLUMNS = {
    "prompts run once": "generation from one prompt",
    "group cache": "group cache",
    "dropped rows": "finished rows leave",
    "planned micro-batches": "planned",
    "shared prompts": "prompts shared in training",
}


def write_config(name: str, folder: str | Path) -> str:
    """Write the `config.json` of a family; return the folder."""
    model_type, fields = FAMILIES[name]
    config = CONFIG_MAPPING[model_type](**fields)
    if model_type in CLASSES:
        config.architectures = [CLASSES[model_type]]
    config.save_pretrained(folder)
    return str(folder)


def is_there(name: str) -> bool:
    """Tell whether the installed transformers has a family."""
    return FAMILIES[name][0] in CONFIG_MAPPING


def measure(name: str) -> dict[str, Any]:
    """Return what `check --model` says of a family, as JSON has it."""
    with tempfile.TemporaryDirectory() as folder:
        result = check_model(read_config(write_config(name, folder)))
    return {**vars(result), "passed": result.passed}


def table(results: dict[str, Any]) -> str:
    """Return the table of the page, with each reason once, by a letter."""
    letters: dict[str, str] = {}

    def cell(reason: str) -> str:
        if reason == "yes":
            return "on"
        letter = letters.setdefault(reason, chr(ord("a") + len(letters)))
        return f"off ({letter})"

    lines = [
        f"| family | {' | '.join(COLUMNS.values())} | gradient | `plan` |",
        f"|---{'|---' * len(COLUMNS)}|---|---|",
    ]
    for name, result in results["families"].items():
        cells = [cell(result["parts"][part]) for part in COLUMNS]
        billions = f"{result['parameters'] / 1e9:.1f} B" if result["plan"] == "yes" else cell(result["plan"])
        lines.append(f"| {name} | {' | '.join(cells)} | {result['gradient_difference']:.0e} | {billions} |")
    reasons = [f"- {letter}: {reason}" for reason, letter in letters.items()]
    return "\n".join([*lines, "", *reasons])


def sentence(results: dict[str, Any]) -> str:
    """Return in one sentence how many families are right."""
    families = results["families"].values()
    count = sum(result["passed"] for result in families)
    worst = max(result["gradient_difference"] for result in families)
    equal = f"{count} of {len(families)} have the tokens of transformers' loop and the gradient of TRL's micro-batches"
    return f"{equal}, the latter to {worst:.0e}."


def page(text: str, results: dict[str, Any]) -> str:
    """Return the page with the table and the sentence of these results, between its two marks."""
    begin, end = "<!-- made by `make families` -->\n", "<!-- up to here -->\n"
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    versions = ", ".join(f"{package} {results['versions'][package]}" for package in ("transformers", "trl"))
    made = f"{sentence(results)} ({versions}, {results['date']}.)\n\n{table(results)}\n"
    return f"{head}{begin}\n{made}\n{end}{tail}"


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Run the families that are named, or all of them, and write what they say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="families of the table; only printed then, and not written")
    names = parser.parse_args().names
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    results = provenance("make families") | {"families": {}}
    for name in names or FAMILIES:
        if is_there(name):
            results["families"][name] = measure(name)
            say(name)
        else:
            say(f"{name} is not in transformers {transformers.__version__}")
    if names:
        say(table(results))
        return
    RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
