"""Folders of runs for the tests of the report: run logs in the documented format, at any size, and damaged ones."""

import json
import math
import random
import re
import statistics
import threading
from contextlib import contextmanager

from runs import write_lines

from trl_drgrpo.report.write import FollowServer

BUCKETS = ("0", "0-25", "25-50", "50-75", "75-100", "100")
START = 1_790_000_000.0
HOSTILE = [
    "</script><img src=x onerror=\"window.__hacked='img'\"><script>window.__hacked='script'</script>",
    "<!--<script>window.__hacked='comment'",
    "line\u2028separator\u2029 nul \x00 bell \x07 \x1b[31mred\x1b[0m",
    "bidi \u202eevil\u202c \u2066isolate\u2069 lone \ud800 surrogate \udfff",
    "{{ 7*7 }} {% raw %} ${7*7} javascript:alert(1) ' onmouseover='window.__hacked=1' \" &lt;b&gt;",
]


def append_lines(path, *lines):
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


@contextmanager
def following(folder):
    """The server of a page that follows a run."""
    with FollowServer([folder]) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def about(**changes):
    versions = {"trl-drgrpo": "0.1.0", "trl": "1.16.0", "torch": "2.13.0"}
    return {
        "format": 1,
        "made_by": "trl-drgrpo",
        "starts": [{"time": START, "step": 0, "versions": versions, "device": "cpu", "processes": 1}],
        "ended": {"time": START + 4000, "step": 200, "how": "finished"},
        "max_steps": 200,
        "model": "Qwen/Qwen2.5-Math-1.5B",
        "adapter": None,
        "dataset": "list-sum",
        "formula": [
            "loss = 1 / (B * L) * sum over rows i and tokens t of l_it      L = 512 tokens",
            "A_i  = r_i - <b>",
        ],
        "objective": {"loss_normalizer": 512, "beta": 0.001, "epsilon": 0.2, "scale_by_running_std": False},
        "settings": {"learning_rate": 1e-6, "lr_scheduler_type": "constant", "num_generations": 8, "seed": 0},
        "rewards": {"names": ["math_reward", "format_reward"], "weights": [1.0, 0.1]},
        "step_rewards": {"names": ["line_is_true"], "weights": [1.0]},
        "right": {"reward": "math_reward", "threshold": 1.0},
        **changes,
    }


def bucket(rate):
    if rate in (0, 1):
        return "0" if rate == 0 else "100"
    return BUCKETS[1 + sum(rate > edge for edge in (0.25, 0.5, 0.75))]


def completion(rng, right, text_length):
    """Spans of a sum worked out line by line, each line one step, some of them wrong."""
    spans, total, step, length = [], rng.randint(1, 9), 0, 0
    while length < text_length:
        term = rng.randint(1, 9)
        slip = not right and rng.random() < 0.4
        said = total + term + (1 if slip else 0)
        text = f"{total}+{term}={said}" + rng.choice(["", ", so we carry on", " (checked)"]) + "\n"
        advantage = round((0.5 if right else -0.4) + (-0.3 if slip else 0.12), 3)
        spans.append({"text": text, "advantage": advantage, "step": step, "step_reward": 1.0 - slip, "masked": False})
        total, step, length = said, step + 1, length + len(text)
    spans[-1]["text"] += f"\\boxed{{{total}}}<|im_end|>"
    return spans


def group_line(rng, step, index, g=8, rate=0.5, text_length=120, time=None):
    rights = [rng.random() < rate for _ in range(g)]
    rewards = [float(right) for right in rights]
    totals = [reward + 0.1 for reward in rewards]
    mean = statistics.fmean(totals)
    rows = []
    for right, reward, total in zip(rights, rewards, totals, strict=True):
        spans = completion(rng, right, max(10, int(rng.gauss(text_length, text_length / 3))))
        rows.append(row_line(spans, {"math_reward": reward, "format_reward": 1.0}, total, total - mean))
        rows[-1] |= {"length": rows[-1]["length"] // 2, "right": right}
    numbers = [rng.randint(10, 99) for _ in range(3)]
    columns = {"answer": str(rng.randint(30, 300)), "level": rng.choice(["easy", "hard"])}
    prompt = "What is the sum of {}, {} and {}?".format(*numbers)
    return line_of(rows, prompt, columns, step=step, time=START + 20 * step if time is None else time, group=index)


def row_line(spans, rewards, reward, advantage):
    length = sum(len(span["text"]) for span in spans)
    fields = {"rewards": rewards, "reward": reward, "advantage": advantage, "length": length}
    return {"spans": spans, **fields, "truncated": False, "right": reward >= 1.0}


def line_of(rows, prompt, columns, **fields):
    rewards = [row["reward"] for row in rows]
    statistic = {"baseline": statistics.fmean(rewards), "std": statistics.stdev(rewards)}
    head = {name: fields.pop(name) for name in ("step", "time")}
    whole = {"prompt": prompt, "G": len(rows), **statistic, "rows": rows, "columns": columns}
    return {**head, "mode": "train", "group": 0, **whole, **fields}


def forked_line(step, text="", **changes):
    """Two parents of four leaves. The first is cut twice; the second's first branch could not be cut again.

    Rewards 1 0 1 1 and 0 0 1 0: nodes of the first parent are worth 3/4, 1/2 and 1, of the second's 1/4, 0 and 1/2.
    """
    rows = [
        ([("2+3=5\n", 0.5), ("so 5+4=9\n", -0.5), ("9", 1.0)], 1.0),
        ([("2+3=5\n", 0.5), ("so 5+4=9\n", -0.5), ("10", -1.0)], 0.0),
        ([("2+3=5\n", 0.5), ("and 4 more\n", 0.5), ("is 9", 0.0)], 1.0),
        ([("2+3=5\n", 0.5), ("and 4 more\n", 0.5), ("are 9", 0.0)], 1.0),
        ([("2+3=6\n", -0.5), ("10", -0.5)], 0.0),
        ([("2+3=6\n", -0.5), ("10", -0.5)], 0.0),
        ([("2+3=6\n", -0.5), ("no, 5\n", 0.5), ("9", 1.0)], 1.0),
        ([("2+3=6\n", -0.5), ("no, 5\n", 0.5), (f"8{text}", -1.0)], 0.0),
    ]
    lines = []
    for spans, reward in rows:
        spans = [{"text": t, "advantage": a, "level": level} for level, (t, a) in enumerate(spans)]
        mean = statistics.fmean(span["advantage"] for span in spans)
        lines.append(row_line(spans, {"math_reward": reward}, reward, mean))
    fields = {"step": step, "time": START + 20 * step, "forks": [2, 2], **changes}
    return line_of(lines, "What is 2+3+4?", {"answer": "9"}, **fields)


def write_forked(folder, text=""):
    """A run whose newest group forks; the one before, of an older release, does not."""
    write_run_log(folder, steps=20, every=10)
    path = folder / "_drgrpo" / "completions.jsonl"
    first, last = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    write_lines(path, [first, forked_line(last["step"], text)])
    return folder


def metrics(rng, step, steps, growth=0.0):
    """Metrics of one step: the model learns; with `growth` wrong answers get longer, as under GRPO."""
    t = step / steps
    rate = 0.15 + 0.7 / (1 + math.exp(-8 * (t - 0.45))) + rng.gauss(0, 0.04)
    rate = min(0.99, max(0.01, rate))
    wrong, right = 90 + 220 * growth * t + rng.gauss(0, 8), 80 + 15 * t + rng.gauss(0, 4)
    all_right, all_wrong = max(0.0, rate - 0.4 + rng.gauss(0, 0.05)), max(0.0, 0.5 - rate + rng.gauss(0, 0.04))
    shares = [max(0.0, math.exp(-(((k / 5) - rate) ** 2) / 0.05) + rng.gauss(0, 0.04)) for k in range(6)]
    ours = [0.0, *[share * weight for share, weight in zip(shares[1:5], (0.3, 0.9, 0.9, 0.4), strict=True)], 0.0]
    grpo = [0.0, *[share * weight for share, weight in zip(shares[1:5], (0.8, 0.9, 0.9, 0.9), strict=True)], 0.0]
    logs = {
        "loss": rng.gauss(0, 0.01),
        "grad_norm": 0.4 + 0.3 * rng.random(),
        "learning_rate": 1e-6,
        "reward": rate + 0.1,
        "reward_std": 0.4,
        "rewards/math_reward/mean": rate,
        "rewards/format_reward/mean": 1.0,
        "kl": 0.001 + 0.02 * t + 0.002 * rng.random(),
        "entropy": 1.2 - 0.7 * t + rng.gauss(0, 0.03) if rng.random() < 0.97 else None,
        "completions/mean_length": (right + wrong) / 2,
        "completions/length_correct_mean": right,
        "completions/length_incorrect_mean": wrong,
        "completions/clipped_ratio": max(0.0, 0.1 - 0.1 * t + rng.gauss(0, 0.01)),
        "drgrpo/pass_rate": rate,
        "drgrpo/dead_groups_frac": all_right + all_wrong,
        "drgrpo/all_correct_frac": all_right,
        "drgrpo/all_incorrect_frac": all_wrong,
        "drgrpo/useful_token_frac": 0.9 + 0.05 * rng.random(),
        "clip_ratio/region_mean": 0.01 * rng.random(),
        "time/generate_s": 8 + rng.random(),
        "time/score_s": 0.5 + 0.2 * rng.random(),
        "time/train_s": 5 + rng.random(),
        "time/tokens_per_s": 900 + 50 * rng.random(),
        "process/reward_mean": 0.5 + 0.3 * t + rng.gauss(0, 0.03),
        "process/steps_mean": 5 + rng.random(),
        "num_tokens": 1e5 * step,
    }
    for name, values in (("groups_frac", shares), ("gradient_weight_frac", ours), ("gradient_weight_frac_grpo", grpo)):
        logs |= {f"difficulty/{name}/{b}": v / sum(values) for b, v in zip(BUCKETS, values, strict=True)}
    return rate, logs


def write_run_log(folder, steps=200, groups_per_step=1, every=10, g=8, seed=0, growth=0.0, text_length=120, **changes):
    """A whole run log; `changes` go into `run.json`."""
    rng = random.Random(seed)
    log = folder / "_drgrpo"
    log.mkdir(parents=True, exist_ok=True)
    (log / "run.json").write_text(json.dumps(about(**{"max_steps": steps, **changes})))
    logged, groups = [], []
    for step in range(1, steps + 1):
        rate, logs = metrics(rng, step, steps, growth)
        logged.append({"step": step, "time": START + 20 * step, "epoch": step / steps, "mode": "train", "logs": logs})
        if step % every == 0:
            groups += [group_line(rng, step, index, g, rate, text_length) for index in range(groups_per_step)]
        if step % 50 == 0:
            values = {"eval_reward": rate, "eval_drgrpo/pass_rate": rate - 0.05}
            logged.append({"step": step, "time": START + 20 * step + 1, "mode": "eval", "logs": values})
    write_lines(log / "metrics.jsonl", logged)
    write_lines(log / "completions.jsonl", groups)
    hard = "61% of the groups were all wrong for 20 steps: the prompts are too hard. Use easier ones."
    high = "KL is four times its usual value. Lower the learning rate, or raise beta."
    warnings = (0.35, "dead_groups_too_hard", hard), (0.8, "kl_out_of_range", high)
    lines = [{"step": int(steps * at), "cause": cause, "message": message} for at, cause, message in warnings]
    write_lines(log / "warnings.jsonl", [{**line, "time": START + 20 * line["step"]} for line in lines])
    return folder


def write_curve(folder, rates):
    """A run that logged its pass rate and nothing else."""
    write_run_log(folder, steps=1, every=2, max_steps=len(rates))
    write_lines(folder / "_drgrpo" / "warnings.jsonl", [])
    lines = [
        {"step": i, "time": START + i, "mode": "train", "logs": {"drgrpo/pass_rate": r}}
        for i, r in enumerate(rates, 1)
    ]
    write_lines(folder / "_drgrpo" / "metrics.jsonl", lines)
    return folder


def write_hostile(folder):
    """A small run whose texts attack the page, wherever text can stand."""
    write_run_log(folder, steps=20, every=20, g=len(HOSTILE), model=HOSTILE[0], dataset=HOSTILE[3])
    log = folder / "_drgrpo"
    line = json.loads((log / "completions.jsonl").read_text())
    line["prompt"] = HOSTILE[0]
    line["columns"] = {HOSTILE[0]: HOSTILE[1]}
    for row, text in zip(line["rows"], HOSTILE, strict=True):
        row["spans"] = [{**row["spans"][0], "text": text}]
    line["rows"][-1]["spans"][0]["text"] += "A" * 5_000_000
    write_lines(log / "completions.jsonl", [line])
    write_lines(log / "warnings.jsonl", [{"step": 3, "time": START, "cause": HOSTILE[0], "message": HOSTILE[1]}])
    return folder


def data_of(page):
    """The JSON inside an HTML report."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])
