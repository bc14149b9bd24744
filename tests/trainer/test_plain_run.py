"""A plain run loads the core alone: what settings ask for, and tools, stay on the disk."""

import ast
import subprocess
import sys
import tokenize
from importlib.util import find_spec

import pytest
from tiny import save_tiny

from trl_drgrpo.config.optional_parts import OPTIONS

# Beside the options: what is imported where it is first used, and what uses the core.
ON_USE = (
    "common.drawing",
    "config.step_preflight",
    "features.fast_path.branch_agreement",
    "features.fast_path.branch_planner",
    "features.fast_path.branches",
    "features.fast_path.decoding.copied_rows",
    "features.fast_path.decoding.hybrid_layers",
    "features.fast_path.decoding.joined_adapters",
    "features.fast_path.decoding.replay",
    "features.fast_path.decoding.row_limits",
    "features.fast_path.decoding.state_updates",
    "features.fast_path.decoding.too_little_memory",
    "features.model_card.card",
    "features.resume.fitting",
    "features.resume.restoring",
    "objective.fork_advantages",
    "objective.loss_terms",
    "objective.step_advantages",
    "objective.value_baseline",
    "process_rewards.published_prms",
    "process_rewards.named",
    "process_rewards.prm_architectures",
    "process_rewards.prm_scorer",
    "process_rewards.turns",
    "rewards.functions",
    "rewards.isolation",
    "rewards.recipe_rewards",
    "single_gpu.adapter_targets",
    "single_gpu.memory",
    "single_gpu.merging",
    "single_gpu.unfit_layers",
    "upstream.completion_tables",
    "upstream.lora_layers",
    "upstream.passed_terms",
    "upstream.prompt_cache",
    "upstream.stop_strings",
    "upstream.vllm_adapters",
    "upstream.weight_sync",
)
TOOLS = ("report", "evaluation", "search", "demo", "check", "cli", "host_proof")
MOST_TOKENS = 101_500
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
RUN = """
import sys
from datasets import Dataset
from trl_drgrpo import DrGRPOConfig, DrGRPOTrainer

def length(completions, **kwargs):
    return [float(len(text) % 3) for text in completions]

folder = sys.argv[1]
args = DrGRPOConfig(folder + "/out", per_device_train_batch_size=4, num_generations=4, max_completion_length=8,
                    max_steps=2, save_strategy="no", report_to="none")
data = Dataset.from_dict({"prompt": ["1+1=", "2+3="] * 4})
DrGRPOTrainer(folder, length, args, data).train()
print("LOADED", [name for name in sys.modules if name.startswith("trl_drgrpo.")])
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory, tokenizer):
    """Modules of this package that a plain run has loaded after two steps."""
    folder = save_tiny(tmp_path_factory.mktemp("plain"), tokenizer)
    command = [sys.executable, "-c", RUN, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout.rsplit("LOADED", 1)[1].strip())


def test_a_plain_run_loads_no_option_and_no_tool(loaded):
    options = [option.home.partition(":")[0] for option in OPTIONS.values()]
    unused = tuple(f"trl_drgrpo.{module}" for module in (*options, *ON_USE, *TOOLS))
    assert [name for name in loaded if name.startswith(unused)] == []


def tokens(module):
    with open(find_spec(module).origin, "rb") as source:
        return sum(token.type not in _NO_CODE for token in tokenize.tokenize(source.readline))


def test_a_plain_run_loads_no_more_than_it_did(loaded):
    sizes = {module: tokens(module) for module in loaded}
    assert sum(sizes.values()) < MOST_TOKENS, sorted(sizes.items(), key=lambda entry: -entry[1])[:40]


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_lives_where_the_table_says(name):
    assert callable(OPTIONS[name].load())
