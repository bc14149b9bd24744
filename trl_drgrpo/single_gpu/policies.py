"""The policy by name: a model, or the folder of an adapter that is trained further on its base.

A checkpoint that lacks weights is refused. transformers makes them at random, and the run would train noise.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.generation import refuse_bad_ends
from trl_drgrpo.common.hub_errors import check_weights, is_adapter, refuse_new_weights
from trl_drgrpo.common.reading import user_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trl_drgrpo.upstream.argument_types import Processor

_RANDOM = "transformers would make them at random: "


def source_of(name: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return path or Hub id of the weights that a policy's name stands for, and the options to load them with.

    The weights of an adapter's folder are those of its base.
    """
    if not is_adapter(name):
        return name, options
    from trl_drgrpo.single_gpu.merging import base_of

    try:
        base, revision = base_of(user_path(name), None)
    except InputError as error:
        raise error.under("model") from error
    check_weights("model", user_path(name))
    # A revision among the options is one of the adapter's repository.
    return base, {**options, "revision": revision}


def load_policy(load: Callable[..., Any], name: str, options: dict[str, Any]) -> Any:
    """
    Load a model to train.

    Args:
        load (`Callable`): TRL's `create_model_from_path`.
        name (`str`): Path or Hub id of a model, or an adapter's folder: that adapter is trained further.
        options (`dict[str, Any]`): Keywords of `from_pretrained`.

    Raises:
        `InputError`: A checkpoint without all weights, or an adapter that does not fit its base.
    """
    base, options = source_of(name, options)
    architecture = _adapted_class(name, base, options)
    # TRL's function passes keywords on to `from_pretrained`, which then returns what it did not find as well.
    model, info = load(base, architecture, **options, output_loading_info=True)
    refuse_new_weights("model", base, model, info, f"{_RANDOM}name a checkpoint that was trained as this model.")
    refuse_bad_ends("model", base, model)
    if not is_adapter(name):
        return model
    from trl_drgrpo.single_gpu.merging import attach, fit_vocabulary

    adapter = user_path(name)
    fit_vocabulary(model, adapter)  # first: embeddings of another number of rows would not load
    return attach(model, adapter, is_trainable=True)


def _adapted_class(name: str, base: str, options: dict[str, Any]) -> "type[PreTrainedModel] | None":
    """Return the class of the base that an adapter was trained on; `None`, for TRL's choice, where there is none."""
    if not is_adapter(name):
        return None
    from transformers import AutoConfig

    from trl_drgrpo.single_gpu.merging import model_class_of

    loading = {key: options[key] for key in ("revision", "trust_remote_code") if key in options}
    return model_class_of(AutoConfig.from_pretrained(base, **loading), user_path(name))


def load_reward_model(load: Callable[..., Any], name: str, options: dict[str, Any]) -> Any:
    """Load a reward model; refuse one without a trained head. Arguments as for [`load_policy`]."""
    model, info = load(name, **options, output_loading_info=True)
    remedy = f"{_RANDOM}name a model that was trained to give rewards."
    refuse_new_weights("reward_funcs", name, model, info, remedy)
    return model


def adapters_tokenizer(name: object, trust_remote_code: bool) -> "Processor | None":
    """Load the tokenizer or processor that was saved with an adapter, whose chat template it was trained with.

    `None` where there is none, or for anything else than an adapter's folder.
    """
    if not (isinstance(name, str) and is_adapter(name)):
        return None
    folder = user_path(name)
    if not (folder / "tokenizer_config.json").is_file():
        return None
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(
        str(folder),
        trust_remote_code=trust_remote_code,
        truncation_side="left",  # both as TRL loads a model's own
        padding_side="left",
    )
