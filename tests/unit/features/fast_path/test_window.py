"""Planned micro-batches as tensors: which rows, cut how, with which fillers."""

import pytest
import torch

from trl_drgrpo.features.fast_path.planner import Budget, Costs
from trl_drgrpo.features.fast_path.window import PLAN, Window, WindowMetrics, is_live
from trl_drgrpo.upstream.batches import unknown_keys

ADVANTAGES = [[0.5, -0.5], [0.0, 0.0], [1.0, -1.0]]
LENGTHS = [[3, 5], [4, 4], [2, 6]]


def stock_micro_batches(**extra):
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
                **{key: make(2, 6) for key, make in extra.items()},
            }
        )
    return batches


def plan(batches, skip=True, **costs):
    return Window(batches, skip=skip, budget=Budget(2, 10), costs=Costs(forward=1.0, **costs))


def slots(window, everyone=None, keep_slots=False):
    return window.micro_batches(everyone or [window.summary()], keep_slots)


def test_rows_without_signal_are_gone_and_the_rest_is_cut_to_size():
    batches = slots(plan(stock_micro_batches()))
    assert len(batches) == 3
    rows = [row for batch in batches for row in batch["advantages"].tolist()]
    assert sorted(rows) == [-1.0, -0.5, 0.5, 1.0]
    for batch in batches:
        if not batch[PLAN]["rows"]:
            continue
        assert batch["prompt_ids"].size(1) == 2
        assert batch["prompt_mask"].all()
        assert batch["completion_mask"].any(dim=0).all()  # no column of padding only
        assert batch["completion_ids"].shape == batch["old_per_token_logps"].shape
        assert batch["num_items_in_batch"] == 24
    assert "window" in batches[-1][PLAN]


def test_every_row_keeps_its_own_values():
    stock = stock_micro_batches()
    expected = {}
    for batch in stock:
        for ids, mask, advantage, old in zip(
            batch["completion_ids"],
            batch["completion_mask"],
            batch["advantages"],
            batch["old_per_token_logps"],
            strict=True,
        ):
            expected[tuple(ids[mask.bool()].tolist())] = (advantage.item(), old[mask.bool()].tolist())
    for batch in slots(plan(stock)):
        for i in range(batch[PLAN]["rows"]):
            mask = batch["completion_mask"][i].bool()
            values = batch["advantages"][i].item(), batch["old_per_token_logps"][i][mask].tolist()
            assert expected[tuple(batch["completion_ids"][i][mask].tolist())] == values


def test_empty_slots_come_first_and_hold_tensors_of_no_rows():
    window = plan(stock_micro_batches())
    batches = slots(window)
    used = [batch[PLAN]["rows"] > 0 for batch in batches]
    assert used == sorted(used)
    assert not used[0]
    assert batches[0]["completion_ids"].shape[0] == 0


def test_a_window_without_signal_runs_one_filler():
    stock = stock_micro_batches()
    for batch in stock:
        batch["advantages"] = torch.zeros(2)
    batches = slots(plan(stock))
    assert [batch[PLAN]["rows"] for batch in batches] == [0, 0, 1]
    assert batches[-1][PLAN]["packs"] == []
    assert not batches[-1]["completion_mask"].any()


def test_fillers_make_ranks_equal_and_hold_nothing():
    window = plan(stock_micro_batches())
    mine = window.summary()
    other = {"batches": [(3, 9), (3, 9), (2, 4)], "rows": 6, "loss_tokens": 22, "leaves_out": False}
    batches = slots(window, [mine, other])
    assert [batch[PLAN]["rows"] for batch in batches] == [3, 3, 2]
    for place, batch in enumerate(batches):
        run = sum(len(pack) for pack in batch[PLAN]["packs"])
        for key in ("completion_mask", "advantages", "old_per_token_logps", "completion_ids"):
            assert not batch[key][run:].any(), key
        tokens = [summary["batches"][place][1] for summary in (mine, other) if place < len(summary["batches"])]
        assert batch[PLAN]["loss_tokens"] == sum(tokens)
    assert batches[-1][PLAN]["window"] == {"rows": 12, "loss_tokens": 46, "leaves_out": True}


def test_in_lockstep_every_slot_runs_something():
    assert all(batch[PLAN]["rows"] > 0 for batch in slots(plan(stock_micro_batches()), keep_slots=True))


def test_vllm_importance_ratios_and_tool_masks_travel_with_their_rows():
    stock = stock_micro_batches(
        importance_sampling_ratio=lambda rows, width: torch.rand(rows, 1),
        sampling_per_token_logps=lambda rows, width: -torch.rand(rows, width),
        tool_mask=lambda rows, width: torch.ones(rows, width, dtype=torch.long),
    )
    stock[0]["tool_mask"][0] = 0  # a row in which a tool wrote everything: nothing to train on
    by_advantage = {
        a.item(): (batch["importance_sampling_ratio"][i].item(), batch["sampling_per_token_logps"][i, 0].item())
        for batch in stock
        for i, a in enumerate(batch["advantages"])
    }
    rows = 0
    for batch in slots(plan(stock)):
        for i in range(batch[PLAN]["rows"]):
            values = batch["importance_sampling_ratio"][i].item(), batch["sampling_per_token_logps"][i, 0].item()
            assert by_advantage[batch["advantages"][i].item()] == values
            rows += 1
    assert rows == 3


def test_live_rows_by_token_advantages():
    inputs = {"completion_mask": torch.tensor([[1, 1, 0], [1, 1, 0], [1, 0, 0]])}
    inputs["advantages"] = torch.tensor([[0.0, 0.2, 0.0], [0.0, 0.0, 0.7], [0.0, 0.0, 0.0]])
    assert is_live(inputs, skip=True).tolist() == [True, False, False]  # 0.7 stands on padding
    assert is_live(inputs, skip=False).tolist() == [True, True, True]


def test_what_cannot_be_regrouped_is_named():
    assert unknown_keys({**stock_micro_batches()[0], "pixel_values": torch.ones(1), "num_images": None}) == [
        "pixel_values"
    ]


def test_statistics_count_padding():
    statistics = plan(stock_micro_batches()).statistics()
    assert statistics["rows"] == 6
    assert statistics["run"] == 4
    assert statistics["upstream"] == 6 * 10
    assert statistics["useful"] == (2 + 2) + (2 + 4) + (2 + 1) + (2 + 5)  # last tokens do not run
    assert statistics["useful"] <= statistics["processed"] <= 40


def test_statistics_count_shared_tokens_once():
    stock = stock_micro_batches()
    for batch in stock:
        batch["completion_ids"][1, :2] = batch["completion_ids"][0, :2]
    statistics = plan(stock, share_prompts=True).statistics()
    # the rows of 3 and 5 tokens share 2 of those that run; the last rows, of 2 and 6, share 1
    assert statistics["useful"] == (2 + 2 + 4 - 2) + (2 + 1 + 5 - 1)
    assert statistics["run"] == 4
    assert statistics["upstream"] == 6 * 10


# Metrics


def test_metrics_are_weighted_by_tokens_and_cover_what_was_left_out():
    metrics = WindowMetrics(clips_rows=False)
    metrics.add({"rows": 4, "loss_tokens": 30}, {"clip_ratio/low_mean": [0.1], "entropy": [2.0]}, ranks=1)
    metrics.add(
        {"rows": 2, "loss_tokens": 10},
        {"clip_ratio/low_mean": [0.5], "entropy": [4.0], "clip_ratio/low_min": [0.2], "clip_ratio/high_max": [0.3]},
        ranks=1,
    )
    # 30 * 0.1 + 10 * 0.5 = 8 clipped tokens of 80; entropy (30 * 2 + 10 * 4) / 40 over the rows that were run
    assert metrics.finish({"rows": 16, "loss_tokens": 80, "leaves_out": True}) == {
        "clip_ratio/low_mean": [pytest.approx(0.1)],
        "entropy": [pytest.approx(2.5)],
        "clip_ratio/low_min": [0.0],
        "clip_ratio/high_max": [0.3],
    }
    assert metrics.finish({"rows": 16, "loss_tokens": 80, "leaves_out": True}) == {}


def test_metrics_of_sequence_ratios_count_rows():
    metrics = WindowMetrics(clips_rows=True)
    metrics.add({"rows": 4, "loss_tokens": 30}, {"clip_ratio/low_mean": [0.25]}, ranks=2)  # 2 of 8 rows
    assert metrics.finish({"rows": 16, "loss_tokens": 80, "leaves_out": True}) == {"clip_ratio/low_mean": [0.125]}


def test_fillers_add_nothing():
    metrics = WindowMetrics(clips_rows=False)
    nothing = {"entropy": [0.0], "clip_ratio/low_mean": [0.0], "clip_ratio/low_min": [float("nan")]}
    metrics.add({"rows": 1, "loss_tokens": 0}, nothing, ranks=1)
    assert metrics.finish({"rows": 8, "loss_tokens": 0, "leaves_out": True}) == {"clip_ratio/low_mean": [0.0]}
