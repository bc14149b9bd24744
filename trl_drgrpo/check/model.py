"""Report of `trl-drgrpo check --model`: parts of the fast path, gradient and tokens compared with TRL, and the plan.

A small random model of the configuration trains for two optimizer steps on the fast path, and once more in TRL's
micro-batches with transformers' generation.
"""

import copy
import dataclasses

from transformers import PreTrainedConfig, PreTrainedModel

from trl_drgrpo.check.small import small_model
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.host_proof.comparison import SETTINGS, ModelResult, compare_with_trl, parts_in_use, train_briefly
from trl_drgrpo.host_proof.tiny import tiny_tokenizer
from trl_drgrpo.single_gpu.memory import Adapter, Planner, Setup
from trl_drgrpo.trainer import DrGRPOTrainer


def check_model(config: PreTrainedConfig, trust_remote_code: bool = False) -> ModelResult:
    """Train a small random model of a configuration on the fast path, and as TRL does; then plan it.

    Args:
        config ([`~transformers.PreTrainedConfig`]): Of a decoder, or of a model that has one.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Run the code that comes with it.

    Returns:
        [`ModelResult`].

    Raises:
        `InputError`: No small model of the configuration can be built, or TRL cannot train it.
    """
    model = small_model(config, tiny_tokenizer(), trust_remote_code)
    try:
        result = compare_with_trl(DrGRPOTrainer, model)
    except InputError as error:
        raise error.under("--model") from error.__cause__
    plan, parameters = _plan(config, model)
    return dataclasses.replace(result, plan=plan, parameters=parameters)


def fast_path_of(model: PreTrainedModel) -> dict[str, str]:
    """Return `"yes"`, or why not, for each part of the fast path, by a training of two steps."""
    return parts_in_use(train_briefly(DrGRPOTrainer, model).speed)


def _plan(config: PreTrainedConfig, model: PreTrainedModel) -> tuple[str, int | None]:
    """Return `"yes"`, or why a model cannot be planned, and its weights at full size.

    All phases are planned for the small model, which has every kind of layer and takes a second.
    """
    adapted = Setup(
        device="cpu",
        autocast=None,
        prompt=64,
        completion=SETTINGS["max_completion_length"],
        adapter=Adapter(targets="all-linear"),
    )
    small_config = copy.deepcopy(model.config)
    # The planner builds the class that a configuration names, and this one may name none, or another one.
    small_config.architectures = [type(model).__name__]
    parameters = None
    try:
        # Full size first: its number of weights is reported also where the small model cannot be planned.
        parameters = Planner(config, Setup(device="cpu")).parameters
        planner = Planner(small_config, adapted)
        planner.estimate(adapted)
    except Exception as error:  # a model may raise anything; what only describes it ends nothing
        return str(error), parameters
    # A count that differs shows that the planner has built another model.
    weights = model.num_parameters()
    if planner.parameters != weights:
        return f"it counts {planner.parameters:,} of the {weights:,} weights of the small model", parameters
    return "yes", parameters
