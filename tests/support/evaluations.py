"""Samples and results of an evaluation, as `trl-drgrpo eval` writes them."""

from trl_drgrpo.evaluation.results import results


def samples(*rewards_by_prompt, tokens=5, finish="stop"):
    """Rows of the samples' file: for each prompt the rewards of its completions; a text is a failure."""
    rows = []
    for problem, rewards in enumerate(rewards_by_prompt):
        for number, reward in enumerate(rewards):
            counts = {"problem": problem, "row": number, "rows": len(rewards), "tokens": tokens}
            failed = {"failures": {"accuracy": reward}} if isinstance(reward, str) else {}
            given = {"accuracy": None if failed else reward}
            counts |= {"finish_reason": finish, "rewards": given, **failed}
            rows.append({"prompt": f"p{problem}", "completion": "c", "eval": counts})
    return rows


def result(model, baseline=None, ks=(1,), dataset="math.jsonl", **facts):
    """The result of samples of a model, and of a baseline."""
    rows = {"baseline": baseline, "model": model} if baseline else {"model": model}
    about = {
        "command": "trl-drgrpo eval",
        "date": "2026-11-22",
        "dataset": {"name": dataset, "config": None, "split": "test", "prompts": model[-1]["eval"]["problem"] + 1},
        "prompt": {"prompt_template": None, "system_prompt": None},
        "sampling": {"temperature": 1.0, "top_p": 1.0, "max_completion_length": 64, "num_samples": 4, "seed": 0},
        "correct": {"reward": "accuracy", "threshold": None},
        **facts,
    }
    return results(about, {role: ({"name": f"/home/me/{role}", "weights": "w"}, rows[role]) for role in rows}, ks)
