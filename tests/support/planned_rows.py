"""Rows as the planner sees them, for properties of plans."""

from hypothesis import strategies as st

from trl_drgrpo.features.fast_path.micro_batch_planner import Budget, Row


@st.composite
def generation_batches(draw):
    """Rows in groups that share a prompt, and a geometry that stock TRL could run them in."""
    group = draw(st.integers(1, 4))
    rows = []
    for prompt in range(draw(st.integers(1, 5))):
        prompt_length = draw(st.integers(1, 30))
        for _ in range(group):
            rows.append(Row(prompt, prompt_length, draw(st.integers(0, 40)), draw(st.booleans())))
    divisors = [n for n in range(1, len(rows) + 1) if len(rows) % n == 0]
    per_batch = draw(st.sampled_from(divisors))
    width = max(row.prompt_length for row in rows) + max(row.completion_length for row in rows)
    return rows, len(rows) // per_batch, Budget(per_batch, width)
