"""The weights that a run starts from: how TRL's constructor gets its models, and the reference that KL is taken to.

TRL finds the reference of a full model by name: it loads the folder that the model's configuration names, whatever the
weights are that were passed. Of an adapter it copies the parameters that hold ".default." in their names, which leaves
out other adapter names, embeddings, IA3 and trainable tokens. Here the reference is always what the run starts from:

- a model that was passed: a frozen copy of it;
- an adapter that was passed, or loaded from its folder: a frozen copy named "ref", with which TRL then scores;
- a new adapter: the model without it, except where its initialization changes the base (PiSSA, OLoRA, ...), so that
  only base and adapter together are what was given;
- a model by name: loaded once more, as in TRL.
"""

import copy
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import PreTrainedModel
from trl import GRPOTrainer

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.upstream.checkpoint_weights import REFERENCE
from trl_drgrpo.upstream.private_state import swapped

if TYPE_CHECKING:
    from trl_drgrpo.config.config import DrGRPOConfig
    from trl_drgrpo.upstream.argument_types import Policy
    from trl_drgrpo.upstream.trl_overrides import HostTrainer

# Values of `init_lora_weights` that subtract the new adapter from the base's weights.
_CHANGES_BASE = ("corda", "loftq", "lora_ga", "olora", "pissa")


@dataclass
class Start:
    """Facts about a policy before its first step.

    Args:
        values (`dict[str, torch.Tensor]`): Values of trainable parameters by name, from before TRL casts those on a
            quantized base. No copies: TRL gives a cast parameter other memory, and this holds on to the first.
        has_new_adapter (`bool`): Whether TRL has made the adapter.
    """

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    has_new_adapter: bool = False

    def note(self, model: torch.nn.Module) -> None:
        """Keep the values of a model's trainable parameters."""
        self.values = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.values[name] = parameter.data


@contextmanager
def starting_weights(trainer: "HostTrainer", model: "Policy", args: "DrGRPOConfig | None") -> Iterator[Start]:
    """Give TRL's constructor, which runs inside the block, its models.

    Args:
        trainer ([`HostTrainer`]): Its `load_policy` and `load_reward_model` load what is given by name.
        model: As given to the trainer.
        args ([`DrGRPOConfig`]): With an adapter that was there before, TRL reads a `beta` of 0 and makes no copy.

    Yields:
        [`Start`]: Complete at the end of the block.
    """
    start = Start()
    trl_module: Any = sys.modules[GRPOTrainer.__module__]
    wrap = trl_module.get_peft_model
    load = trl_module.create_model_from_path
    is_object = isinstance(model, torch.nn.Module)
    with ExitStack() as construction:

        def begin_with(policy: torch.nn.Module) -> None:
            start.note(policy)
            if isinstance(policy, PeftModel) and args is not None:
                construction.enter_context(swapped(args, beta=0.0))

        # TRL puts the new adapter onto the policy here, and casts it right behind this call where the base is
        # quantized: these are the last values in full precision.
        def get_peft_model(*arguments: Any, **options: Any) -> PeftModel:
            policy = wrap(*arguments, **options)
            start.has_new_adapter = True
            start.note(policy)
            return policy

        # TRL loads a policy that is given by name here, and the reference of a full model by the policy's name.
        def create_model_from_path(name: str, **options: Any) -> torch.nn.Module:
            if is_object:  # nothing is left to load but the reference
                return _frozen_copy(trainer.model)
            is_policy = not start.values  # TRL loads the policy first, then its reference
            loaded = trainer.load_policy(load, name, options)
            if is_policy:
                begin_with(loaded)
            return loaded

        # TRL loads reward models that are given by name with this class.
        class RewardModels(trl_module.AutoModelForSequenceClassification):
            @classmethod
            def from_pretrained(cls, name: str, **options: Any) -> PreTrainedModel:
                return trainer.load_reward_model(super().from_pretrained, name, options)

        if is_object:
            begin_with(model)
        loaders = {"create_model_from_path": create_model_from_path, "get_peft_model": get_peft_model}
        construction.enter_context(swapped(trl_module, AutoModelForSequenceClassification=RewardModels, **loaders))
        yield start


def _frozen_copy(model: torch.nn.Module) -> torch.nn.Module:
    """The reference of a model that was passed. Tied weights stay tied, quantized ones quantized."""
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        remedy = "Its weights cannot be copied for the reference: pass the model's name, or set beta=0."
        raise InputError("model", "a model whose weights DeepSpeed has partitioned, with beta > 0", "a name", remedy)
    return copy.deepcopy(model).requires_grad_(False).eval()


def add_reference_adapter(model: torch.nn.Module, is_new: bool) -> None:
    """Put a frozen copy of a model's active adapter beside it, under the name that TRL scores the reference with.

    Args:
        model ([`~peft.PeftModel`]): The policy; anything else is left as it is.
        is_new (`bool`): Whether TRL has just made the adapter. The reference then is the model without it, and needs
            no copy unless the initialization of the adapter has changed the base.
    """
    if not isinstance(model, PeftModel):
        return
    name = str(model.active_adapter)
    config: Any = copy.copy(model.peft_config[name])
    config.inference_mode = True  # AdaLoRA takes a second adapter only if it is not trained
    initialization = getattr(config, "init_lora_weights", None)
    if is_new and not str(initialization).startswith(_CHANGES_BASE):
        return
    if REFERENCE in model.peft_config:  # from an earlier run with this model
        model.delete_adapter(REFERENCE)
    if isinstance(initialization, str):
        config.init_lora_weights = True  # any other could change the base once more
    with torch.random.fork_rng():  # a copy draws no random numbers
        model.add_adapter(REFERENCE, config)
    state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    set_peft_model_state_dict(model, state, adapter_name=REFERENCE)
    # A new adapter may come trainable and in another dtype. The name of an adapter is a part of its parameters' names:
    # `layers.0.q_proj.lora_A.ref.weight` is the copy of `layers.0.q_proj.lora_A.default.weight`.
    parameters = dict(model.named_parameters())
    for path, parameter in parameters.items():
        parts = path.split(".")
        if REFERENCE in parts:
            original = parameters[".".join(name if part == REFERENCE else part for part in parts)]
            parameter.requires_grad = False
            parameter.data = parameter.data.to(original.dtype)
