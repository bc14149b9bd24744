"""Settings that decide a run: every field has its place, and every difference a name."""

import dataclasses
import functools

import pytest
from datasets import Dataset

from trl_drgrpo import DrGRPOConfig
from trl_drgrpo.features.diagnostics.run_facts import OBJECTIVE_FIELDS
from trl_drgrpo.features.resume.restoring import differences, refuse_another
from trl_drgrpo.features.resume.settings import FACTS, ON_RESUME, classes_of, dataset_mark
from trl_drgrpo.rewards import MathReward, gated, weighted_sum
from trl_drgrpo.rewards.options import reward_options

FIELDS = {field.name for field in dataclasses.fields(DrGRPOConfig)}


def test_every_field_is_in_exactly_one_class():
    assert {name: classes for name in FIELDS if len(classes := classes_of(name)) != 1} == {}
    listed = [name for names in ON_RESUME.values() for name in names]
    assert len(listed) == len(set(listed))
    assert {*listed, *OBJECTIVE_FIELDS} - FIELDS - {*FACTS} <= {"local_rank"}  # a newer transformers has none


def test_every_setting_has_its_class_at_a_resume():
    expected = {
        "kept": "learning_rate weight_decay optim_args",
        "refused": "optim loss_normalizer base reference",
        "objective": "beta temperature reward_weights advantage_baseline step_separator epsilon",
        "generated again": "num_generations generation_batch_size steps_per_generation",
        "unsaid": "output_dir hub_token report_to vllm_server_base_url",
        "anew": """seed data_seed max_steps lr_scheduler_type logging_steps save_steps eval_steps ignore_data_skip
            chat_template_kwargs generation_kwargs use_vllm vllm_mode bf16 dynamic_sampling neftune_noise_alpha
            dtype attn_implementation quantization tokenizer chat_template train_dataset reward_options versions""",
    }
    for how, names in expected.items():
        assert {name: classes_of(name) for name in names.split()} == {name: [how] for name in names.split()}


def test_one_row_of_many_is_seen():
    rows = [{"prompt": str(i), "answer": i} for i in range(4000)]
    marks = {dataset_mark(Dataset.from_list(rows))}
    for place in (0, 1777, 3999):
        changed = [*rows]
        changed[place] = {"prompt": "other", "answer": place}
        marks.add(dataset_mark(Dataset.from_list(changed)))
    marks.add(dataset_mark(Dataset.from_list(rows[::-1])))
    assert len(marks) == 5
    assert dataset_mark(Dataset.from_list(rows)) in marks


def test_keys_of_mappings_that_differ_are_named():
    before = {"versions": {"torch": "2.12", "trl": "1.16"}, "seed": 1, "model": "a", "gone": 1}
    now = {"versions": {"torch": "2.13", "trl": "1.16"}, "seed": 1, "model": "b", "new": 2}
    assert list(differences(before, now)) == [("versions: torch", "2.12", "2.13")]


def test_weights_of_another_type_are_not_another_base():
    before = {"base": "3 weights (a)", "dtype": "float32", "quantization": None}
    refuse_another(before, {**before, "base": "3 weights (b)", "dtype": "bfloat16"}, "checkpoint-1")
    with pytest.raises(ValueError, match="^model: got the base "):
        refuse_another(before, {**before, "base": "3 weights (b)"}, "checkpoint-1")


def by_length(completions, **kwargs):
    return [len(text) for text in completions]


def scaled(by):
    def reward(completions, **kwargs):
        return [by * len(text) for text in completions]

    return reward


class Client:
    def __init__(self, **options):
        self.api_key, self.address = "sk-12345678", "http://me:word@host"
        self._session = object()
        self.options = options

    def __call__(self, completions, **kwargs):
        return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("first", "second", "path"),
    [
        (functools.partial(by_length, by=1), functools.partial(by_length, by=2), "by"),
        (scaled(1), scaled(2), "by"),
        (Client(timeout=1), Client(timeout=2), "options.timeout"),
        (MathReward(), MathReward(answer_format="boxed"), "answer_format"),
        (weighted_sum([[MathReward(), 1.0]]), weighted_sum([[MathReward(), 2.0]]), None),
        (gated(by_length, MathReward()), gated(by_length, MathReward(think_opened=True)), None),
    ],
)
def test_another_option_is_seen_wherever_it_is_held(first, second, path):
    before, now = reward_options(first), reward_options(second)
    differing = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    assert differing
    assert path is None or differing == [path]
    assert reward_options(first) == before


def test_no_secret_is_an_option():
    options = str(reward_options(Client(token="hf_12345678")))
    assert not any(secret in options for secret in ("sk-1234", "word", "hf_1234"))
