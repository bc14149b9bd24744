"""Planned micro-batches as tensors: which rows, cut how, with which fillers."""

import pytest
import torch

from trl_drgrpo.features.fast_path.micro_batch_planner import Budget, Costs
from trl_drgrpo.features.fast_path.window import PLAN, Window, WindowMetrics, is_live, windows
from trl_drgrpo.upstream.batches import unknown_keys

ADVANTAGES = [[0.5, -0.5], [0.0, 0.0], [1.0, -1.0]]
LENGTHS = [[3, 5], [4, 4], [2, 6]]


@pytest.fixture
def stock():
    """Three micro-batches of two rows, prompts of 2 in a width of 4, completions in a width of 6."""
    batches = []
    for number, (advantages, lengths) in enumerate(zip(ADVANTAGES, LENGTHS, strict=True)):
        mask = (torch.arange(6) < torch.tensor(lengths)[:, None]).long()
        ids = torch.arange(12).view(2, 6) + 100 * number
        batches.append(
            {
                "prompt_ids": torch.tensor([[0, 0, 7, 8 + number]] * 2),
                "prompt_mask": torch.tensor([[0, 0, 1, 1]] * 2),
                "completion_ids": ids * mask,
                "completion_mask": mask,
                "advantages": torch.tensor(advantages),
                "num_items_in_batch": torch.tensor(24),
                "old_per_token_logps": -1.0 - ids.double(),
                "sampling_per_token_logps": -torch.rand(2, 6),
                "importance_sampling_ratio": torch.rand(2, 1),
                "tool_mask": torch.ones(2, 6, dtype=torch.long),
            }
        )
    return batches


def plan(batches, **costs):
    return Window(batches, skip=True, budget=Budget(2, 10), costs=Costs(forward=1.0, **costs))


def slots(window, *others, keep_slots=False):
    return window.micro_batches([window.summary(), *others], keep_slots)


def values_of(batch, row):
    """Everything that belongs to a row, by the tokens of its completion."""
    mask = batch["completion_mask"][row].bool()
    per_token = ("old_per_token_logps", "sampling_per_token_logps", "tool_mask")
    values = [batch["advantages"][row].item(), batch["importance_sampling_ratio"][row].item()]
    values += [batch[name][row][mask].tolist() for name in per_token]
    return tuple(batch["completion_ids"][row][mask].tolist()), values


def test_rows_without_signal_are_gone_and_the_rest_is_cut_to_size(stock):
    stock[0]["tool_mask"][0] = 0  # a row in which a tool wrote everything: nothing to train on
    expected = dict(values_of(batch, row) for batch in stock for row in range(2))
    batches = slots(plan(stock))
    assert len(batches) == 3
    assert sorted(row for batch in batches for row in batch["advantages"].tolist()) == [-1.0, -0.5, 1.0]
    for batch in batches:
        if not batch[PLAN]["rows"]:
            assert batch["completion_ids"].shape[0] == 0
            continue
        assert batch["prompt_ids"].size(1) == 2
        assert batch["prompt_mask"].all()
        assert batch["completion_mask"].any(dim=0).all()  # no column of padding only
        assert batch["completion_ids"].shape == batch["old_per_token_logps"].shape
        assert batch["num_items_in_batch"] == 24
        for row in range(batch[PLAN]["rows"]):
            tokens, values = values_of(batch, row)
            assert expected[tokens] == values
    assert [batch[PLAN]["rows"] > 0 for batch in batches] == [False, True, True]  # empty slots come first
    assert "window" in batches[-1][PLAN]


def test_a_window_without_signal_runs_one_filler(stock):
    for batch in stock:
        batch["advantages"] = torch.zeros(2)
    batches = slots(plan(stock))
    assert [batch[PLAN]["rows"] for batch in batches] == [0, 0, 1]
    assert batches[-1][PLAN]["packs"] == []
    assert not batches[-1]["completion_mask"].any()


def test_fillers_make_ranks_equal_and_hold_nothing(stock):
    window = plan(stock)
    mine = window.summary()
    other = {"batches": [(3, 9), (3, 9), (2, 4)], "rows": 6, "loss_tokens": 22, "leaves_out": False}
    batches = slots(window, other)
    assert [batch[PLAN]["rows"] for batch in batches] == [3, 3, 2]
    for place, batch in enumerate(batches):
        run = sum(len(pack) for pack in batch[PLAN]["packs"])
        for key in ("completion_mask", "advantages", "old_per_token_logps", "completion_ids"):
            assert not batch[key][run:].any(), key
        tokens = [summary["batches"][place][1] for summary in (mine, other) if place < len(summary["batches"])]
        assert batch[PLAN]["loss_tokens"] == sum(tokens)
    assert batches[-1][PLAN]["window"] == {"slots": 3, "rows": 12, "loss_tokens": 46, "leaves_out": True}
    assert all(batch[PLAN]["rows"] > 0 for batch in slots(window, keep_slots=True))  # in lockstep


def test_live_rows_by_token_advantages_and_what_cannot_be_regrouped(stock):
    inputs = {"completion_mask": torch.tensor([[1, 1, 0], [1, 1, 0], [1, 0, 0]])}
    inputs["advantages"] = torch.tensor([[0.0, 0.2, 0.0], [0.0, 0.0, 0.7], [0.0, 0.0, 0.0]])
    assert is_live(inputs, skip=True).tolist() == [True, False, False]  # 0.7 stands on padding
    assert is_live(inputs, skip=False).tolist() == [True, True, True]
    assert unknown_keys({**stock[0], "pixel_values": torch.ones(1), "num_images": None}) == ["pixel_values"]


def test_statistics_count_padding_and_shared_tokens_once(stock):
    statistics = plan(stock).statistics()
    assert (statistics["rows"], statistics["run"], statistics["upstream"]) == (6, 4, 6 * 10)
    assert statistics["useful"] == (2 + 2) + (2 + 4) + (2 + 1) + (2 + 5)  # last tokens do not run
    assert statistics["useful"] <= statistics["processed"] <= 40
    for batch in stock:
        batch["completion_ids"][1, :2] = batch["completion_ids"][0, :2]
    # the rows of 3 and 5 tokens share 2 of those that run; the last rows, of 2 and 6, share 1
    assert plan(stock, share_prompts=True).statistics()["useful"] == (2 + 2 + 4 - 2) + (2 + 1 + 5 - 1)


@pytest.mark.parametrize(
    ("number", "accumulation", "expected"), [(8, 4, 2), (8, 8, 1), (2, 8, 1), (3, 2, 3), (2, 3, 2)]
)
def test_windows_are_what_one_optimizer_step_sees(number, accumulation, expected):
    parts = windows(number, accumulation)
    assert len(parts) == expected
    assert [slot for part in parts for slot in part] == list(range(number))
    steps: dict = {}  # slots of one window never straddle two optimizer steps
    for micro_step in range(4 * number * accumulation):
        generation, slot = divmod(micro_step, number)
        window = next(i for i, part in enumerate(parts) if slot in part)
        steps.setdefault((generation, window), set()).add(micro_step // accumulation)
    assert all(len(each) == 1 for each in steps.values())


LOW, ENTROPY = "clip_ratio/low_mean", "entropy"


@pytest.mark.parametrize(
    ("clips_rows", "ranks", "logged", "tokens", "expected"),
    [
        (  # 30 * 0.1 + 10 * 0.5 = 8 clipped tokens of 80; entropy (30 * 2 + 10 * 4) / 40 over the rows that were run
            False,
            1,
            [
                ({"rows": 4, "loss_tokens": 30}, {LOW: [0.1], ENTROPY: [2.0]}),
                (
                    {"rows": 2, "loss_tokens": 10},
                    {LOW: [0.5], ENTROPY: [4.0], "clip_ratio/low_min": [0.2], "clip_ratio/high_max": [0.3]},
                ),
            ],
            80,
            {LOW: [0.1], ENTROPY: [2.5], "clip_ratio/low_min": [0.0], "clip_ratio/high_max": [0.3]},
        ),
        (True, 2, [({"rows": 4, "loss_tokens": 30}, {LOW: [0.25]})], 80, {LOW: [0.125]}),  # 2 of 8 rows
        (  # fillers
            False,
            1,
            [({"rows": 1, "loss_tokens": 0}, {ENTROPY: [0.0], LOW: [0.0], "clip_ratio/low_min": [float("nan")]})],
            0,
            {LOW: [0.0]},
        ),
    ],
    ids=["tokens", "rows", "fillers"],
)
def test_metrics_are_weighted_and_cover_what_was_left_out(clips_rows, ranks, logged, tokens, expected):
    metrics = WindowMetrics(clips_rows)
    for plan, values in logged:
        metrics.add(plan, values, ranks)
    window = {"rows": 16, "loss_tokens": tokens, "leaves_out": True}
    assert metrics.finish(window) == {name: pytest.approx(values) for name, values in expected.items()}
    assert metrics.finish(window) == {}
