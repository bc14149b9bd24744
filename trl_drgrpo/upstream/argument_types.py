"""Types of a trainer's arguments."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from trl_drgrpo.rewards.contract import RewardFunction

if TYPE_CHECKING:
    from trl_drgrpo.process_rewards.step_scorer import StepRewardFunction

T = TypeVar("T")
OneOrMore: TypeAlias = T | Sequence[T]
Policy = str | PreTrainedModel | PeftModel  # a name is that of a model on the Hub or in a folder
ScoringModel = Callable[..., Any]  # a model, or a function that runs one on other inputs
RewardSource = RewardFunction | str | PreTrainedModel  # a name is that of a reward model
StepRewardSource: TypeAlias = "StepRewardFunction | str | dict[str, Any]"
Data = Dataset | IterableDataset
EvalData = Data | DatasetDict | IterableDatasetDict | dict[str, Data]
Processor = PreTrainedTokenizerBase | ProcessorMixin
Optimizers = tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None]
EnvironmentFactory = Callable[[], object] | dict[str, Callable[[], object]]  # one, or several by name
