"""Parts of the fast path that a model gets, and a test of its gradient and tokens: `trl-drgrpo check --model`.

A small random model of the configuration trains for two optimizer steps on the fast path, and once more in TRL's
micro-batches with transformers' generation.
"""

from typing import Any

from trl_drgrpo.check.small import small_model
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.host_proof.comparison import ModelResult, compare_with_trl, parts_in_use, train_briefly
from trl_drgrpo.host_proof.tiny import tiny_tokenizer
from trl_drgrpo.trainer import DrGRPOTrainer


def check_model(config: Any, trust_remote_code: bool = False) -> ModelResult:
    """Train a small random model of a configuration on the fast path, and as TRL does.

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
        return compare_with_trl(DrGRPOTrainer, model)
    except InputError as error:
        raise error.under("--model") from error.__cause__


def fast_path_of(model: Any) -> dict[str, str]:
    """Return `"yes"`, or why not, for each part of the fast path, by a training of two steps."""
    return parts_in_use(train_briefly(DrGRPOTrainer, model).speed)
