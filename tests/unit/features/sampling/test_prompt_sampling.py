"""Batches are the same however many processes fill them, and in however many rounds."""

import random
import statistics
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from trl_drgrpo.common.errors import InputError
from trl_drgrpo.config.optional_parts import NoTurns
from trl_drgrpo.features.sampling.prompt_sampling import PromptSampling

DATA = Dataset.from_dict({"prompt": [f"{'live' if i % 3 == 0 else 'dead'} {i}" for i in range(30)]})
GROUP = 2


class World:
    """Processes that wait for each other where they exchange lists."""

    def __init__(self, size):
        self.size, self.barrier, self.lists = size, threading.Barrier(size), [[]] * size

    def gathered(self, rank, values):
        self.lists[rank] = values
        self.barrier.wait(timeout=20)
        everyone = [value for each in self.lists for value in each]
        self.barrier.wait(timeout=20)
        return everyone


def sampling(world, rank, rows, data=DATA, **fields):
    """The feature on a trainer that samples nothing: a live prompt's first completion is the better one."""
    settings = {"dynamic_sampling": True, "max_sampling_rounds": 5, "curriculum": False, "curriculum_q_min": 0.2}
    settings |= {"seed": 0, "generation_batch_size": rows, "prior_pass_rates": None, "num_generations": GROUP}
    settings |= {"shuffle_dataset": True, **fields}
    logged = []
    trainer = SimpleNamespace(
        args=SimpleNamespace(correct_reward=None, correct_threshold=None, **settings),
        accelerator=SimpleNamespace(num_processes=world.size, process_index=rank),
        training_examples=data,
        model=SimpleNamespace(training=True),
        turns=NoTurns(),
        reward_func_names=["passes"],
        pad_token_id=0,
        gathered=lambda values: world.gathered(rank, values),
        log_batch=lambda metrics, columns: logged.append(metrics),
    )
    feature = PromptSampling(trainer)
    feature.on_trainer_built()
    return feature, logged


def generate(rows):
    numbers = [int(row["prompt"].split()[1]) + 1 for row in rows]
    ids = torch.tensor([[number] * 3 for number in numbers])
    mask = torch.tensor([[1] * (1 + number % 3) + [0] * (2 - number % 3) for number in numbers])
    advantages = torch.tensor([1.0 if "live" in row["prompt"] else 0.0 for row in rows])
    batch = {"prompt_ids": ids[:, :1], "prompt_mask": mask[:, :1], "completion_ids": ids * mask}
    return batch | {"completion_mask": mask, "advantages": advantages, "num_items_in_batch": torch.tensor(7)}


def collected(size, batches=2, rows=12, **fields):
    """Whole batches, in the order of ranks, and the metrics of the first rank."""
    world = World(size)
    share = rows // size

    def of_rank(rank):
        feature, logged = sampling(world, rank, rows, **fields)
        found = []
        for start in range(batches):
            examples = [DATA[start * (rows // GROUP) + i // GROUP] for i in range(rows)]
            found.append(feature.collecting(examples[rank * share : (rank + 1) * share], generate))
        return found, logged

    with ThreadPoolExecutor(size) as pool:
        ranks = list(pool.map(of_rank, range(size)))
    whole = []
    for parts in zip(*(found for found, _ in ranks), strict=True):
        rows_of = [list(zip(p["prompt_ids"].flatten().tolist(), p["advantages"].tolist(), strict=True)) for p in parts]
        whole.append([row for part in rows_of for row in part])
    return whole, ranks[0][1]


def test_a_batch_has_the_first_live_groups_and_their_weight():
    (first, second), logged = collected(1)
    for batch, metrics in zip((first, second), logged, strict=True):
        numbers = [number - 1 for number, _ in batch]
        assert numbers[::2] == numbers[1::2]
        assert all(number % 3 == 0 for number in numbers)
        assert len(set(numbers)) == 6
        weight = metrics["sampling/weight_mean"][0]
        assert [advantage for _, advantage in batch] == pytest.approx([weight] * 12)


@pytest.mark.parametrize("size", [2, 3, 4])  # groups of two straddle three and four processes
def test_processes_agree(size):
    whole, logged = collected(size)
    alone, _ = collected(1)
    assert whole == alone
    # rounds are multiples of what the processes can share, but the tokens of all of them are counted
    assert logged[0]["sampling/tokens_per_live_group"][0] > 0


@pytest.mark.parametrize("size", [1, 3])
def test_a_curriculum_draws_alike(size):
    whole, _ = collected(size, dynamic_sampling=False, curriculum=True)
    assert whole == collected(1, dynamic_sampling=False, curriculum=True)[0]


def test_groups_that_are_missing_do_not_train():
    data = DATA.filter(lambda row: "dead" in row["prompt"] or row["prompt"] in ("live 0", "live 3"))
    feature, logged = sampling(World(1), 0, 12, data=data, max_sampling_rounds=3)
    batch = feature.collecting([DATA[i // GROUP] for i in range(12)], generate)
    # two live groups among 18 draws: their sum over the cap
    assert batch["advantages"].tolist() == pytest.approx([6 / 18] * 4 + [0.0] * 8)
    assert logged[0]["sampling/capped_frac"] == [1.0]
    assert batch["num_items_in_batch"] == 7


def test_padding_of_rounds_is_joined():
    feature, _ = sampling(World(1), 0, 12)
    batch = feature.collecting([DATA[i // GROUP] for i in range(12)], generate)
    for ids, mask in zip(batch["completion_ids"], batch["completion_mask"], strict=True):
        assert (ids > 0).eq(mask > 0).all()
        assert mask.sum() == 1 + ids[0] % 3


def test_a_short_stream_begins_again_and_an_empty_one_is_an_error():
    data = Dataset.from_dict({"prompt": ["dead 0", "dead 1", "dead 2"]}).to_iterable_dataset()
    examples = [{"prompt": f"dead {i // GROUP}"} for i in range(4)]
    feature, logged = sampling(World(1), 0, 4, data=data)
    feature.collecting(examples, generate)
    assert logged[0]["sampling/draws"] == [10.0]
    feature, _ = sampling(World(1), 0, 4, data=data.filter(lambda row: False))
    with pytest.raises(InputError, match="train_dataset: got a stream that has ended"):
        feature.collecting(examples, generate)


@pytest.mark.parametrize("fields", [{}, {"curriculum": True}, {"curriculum": True, "dynamic_sampling": False}])
def test_rows_that_share_a_prompt_are_estimated_without_bias(fields):
    """Four rows, batches of two groups, up to all four drawn: the mean of `g` over rows, within 4 standard errors."""
    rows = [("live 0", 0.0), ("live 0", 3.0), ("live 1", -1.0), ("dead 2", 0.0)]  # one prompt, two answers
    data = Dataset.from_dict({"prompt": [prompt for prompt, _ in rows], "g": [g for _, g in rows]})
    feature, _ = sampling(World(1), 0, 4, data=data, max_sampling_rounds=2, **fields)
    feature.pass_rates.take_prior({feature.stream.key(row): (i / 10, 100.0) for i, row in enumerate(data)})

    def of_rows(rows):
        return generate(rows) | {"advantages": torch.tensor([row["g"] for row in rows])}

    chance, found = random.Random(0), []
    for _ in range(3000):
        drawn = chance.sample(list(data), 2)
        batch = feature.collecting([row for row in drawn for _ in range(GROUP)], of_rows)
        found.append(batch["advantages"].mean().item())
    assert abs(statistics.fmean(found) - 0.5) < 4 * statistics.stdev(found) / len(found) ** 0.5


def test_images_are_refused():
    feature, _ = sampling(World(1), 0, 4)
    with pytest.raises(InputError, match="dynamic_sampling: got a batch with pixel_values; expected text only"):
        feature.collecting([DATA[0]] * 4, lambda rows: generate(rows) | {"pixel_values": torch.zeros(len(rows))})
