"""Monte-Carlo values by hand on a scripted generator, and rollouts of a real tiny model."""

import pytest
import torch

from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.process_rewards import MonteCarloScorer, TransformersRollouts

# How the scripted policy goes on from each prefix; the verifier accepts what ends in "!".
SCRIPT = {
    "p:": ["a b!", "a c", "x", "y"],  # 1 of 4
    "p:a ": ["b!", "b!", "c", "d"],  # 2 of 4
    "p:a b ": ["!", "!", "!", "?"],  # 3 of 4
    "p:z ": ["?", "?", "?", "?"],  # 0 of 4
}


class Characters:
    """A tokenizer of characters."""

    all_special_tokens = ("<eos>",)

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(character) for character in text]}

    def apply_chat_template(self, messages, **kwargs):
        return {"input_ids": [1, *(ord(character) for character in messages[-1]["content"]), 2]}


class Scripted:
    def __init__(self):
        self.prefixes = []

    def __call__(self, prefixes, k):
        self.prefixes.append(["".join(map(chr, prefix)) for prefix in prefixes])
        return [SCRIPT[prefix][:k] for prefix in self.prefixes[-1]]


def scorer_of(verifier=None, scripted=None, **options):
    return MonteCarloScorer(scripted or Scripted(), verifier or ends_well, Characters(), **{"k": 4, **options})


def ends_well(completions, **kwargs):
    return [float(completion.endswith("!")) for completion in completions]


def call_of(prompts, completions, steps, **more):
    ids = [[ord(character) for step in row for character in step] for row in steps]
    ends = [[len("".join(row[: k + 1])) - 1 for k in range(len(row))] for row in steps]
    given = {"prompts": prompts, "completions": completions, "steps": steps}
    return {**given, "completion_ids": ids, "step_ends": ends, **more}


CALL = call_of(
    ["p:"] * 4, ["a b !", "a b ?", "z !", ""], [("a ", "b ", "!"), ("a ", "b ", "?<|im_end|>"), ("z ", "!"), ()]
)


def test_values_are_shares_of_accepted_rollouts_and_the_last_is_the_verdict():
    logged = {}
    scripted = Scripted()
    scorer = scorer_of(scripted=scripted)
    values = scorer(**CALL, log_metric=logged.__setitem__)
    assert values == [[0.5, 0.75, 1.0], [0.5, 0.75, 0.0], [0.0, 1.0], []]
    assert scripted.prefixes == [["p:a ", "p:a b ", "p:z "]]  # equal prefixes once, nothing behind the last step
    assert scorer(**CALL) == values
    assert len(scripted.prefixes) == 2  # nothing is kept between calls
    assert logged == {"process_rewards/monte_carlo/rollouts": 12.0}


def test_a_value_does_not_know_that_the_row_stops_behind_it():
    """With an EOS behind the last separator the last step is rolled out."""
    call = call_of(["p:"], ["a b !"], [("a ", "b ")])
    with_eos = {**call, "completion_ids": [[*call["completion_ids"][0], 0]]}
    for given, value in ((with_eos, 0.75), (call, 1.0)):
        assert scorer_of().is_causal
        assert scorer_of()(**given) == [[0.5, value]]


def test_equal_prefixes_with_another_answer_are_judged_apart():
    def is_answer(completions, answer, **kwargs):
        return [float(completion == wanted) for completion, wanted in zip(completions, answer, strict=True)]

    call = call_of(["p:"] * 2, ["a b!"] * 2, [("a ", "b!")] * 2, answer=["a b!", "a c"])
    assert scorer_of(is_answer)(**call) == [[0.5, 1.0], [0.25, 0.0]]


def test_the_verifier_is_called_as_the_trainer_calls_it():
    calls = []

    def verifier(prompts, completions, completion_ids, trainer_state, log_metric, log_extra, answer):
        log_metric("x", 1.0)
        log_extra("x", completions)
        calls.append((prompts, completions, completion_ids, trainer_state, answer))
        return [1.0] * len(completions)

    generated = []

    def generate(prefixes, k):
        generated.append((prefixes, k))
        return [["go", "on<eos>"] for _ in prefixes]

    prompt = [{"role": "user", "content": "q"}]
    completion = [{"role": "assistant", "content": "ab"}]
    scorer = MonteCarloScorer(generate, verifier, Characters(), k=2)
    tokens = {"completion_ids": [[97, 98, 3]], "step_ends": [[0, 2]]}
    values = scorer([prompt], [completion], [("a", "b<eos>")], **tokens, trainer_state="state", answer=["z"])
    assert values == [[1.0, 1.0]]
    assert generated == [([[1, 113, 2, 97]], 2)]  # exact to the token: the rendered prompt, and the first step's ids
    said = [[{"role": "assistant", "content": text}] for text in ("ago", "aon")]  # the format of the completion
    ids = [[97, 103, 111], [97, 111, 110, *map(ord, "<eos>")]]
    assert calls == [([prompt] * 3, [completion, *said], [[97, 98, 3], *ids], "state", ["z"] * 3)]


def test_rollouts_that_cannot_be_scored_are_not_counted():
    def verifier(completions, **kwargs):
        return [None if text.endswith(("c", "?")) else float(text.endswith("!")) for text in completions]

    values = scorer_of(verifier)(**CALL)
    assert values == [[2 / 3, 1.0, 1.0], [2 / 3, 1.0, None], [None, 1.0], []]


def test_bad_input():
    with pytest.raises(InputError, match="k: got 0"):
        scorer_of(k=0)

    async def later(completions, **kwargs):
        return [1.0]

    with pytest.raises(InputError, match="verifier: got the asynchronous 'later'"):
        scorer_of(later)
    with pytest.raises(RewardError, match=r"generator of 'monte_carlo': got 3 groups of \[1\] texts"):
        scorer_of(scripted=lambda prefixes, k: [["a"] for _ in prefixes])(**CALL)
    with pytest.raises(RewardError, match="reward function '<lambda>': got TypeError"):
        scorer_of(lambda completions: ends_well(completions))(**CALL)  # no **kwargs


def test_rollouts_of_a_model_repeat_with_the_seed(model, tokenizer):
    prefixes = [tokenizer(text)["input_ids"] for text in ("1+1=", "a longer prefix: ")]

    def sample(seed):
        rollouts = TransformersRollouts(model, tokenizer, max_new_tokens=8, seed=seed, batch_size=3)
        return [rollouts(prefixes, 4), rollouts(prefixes, 4)]

    model.train()
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = sample(0)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.training
    assert [len(group) for group in first[0]] == [4, 4]
    assert sample(0) == first
    assert first[0] != first[1]  # each call draws anew
    assert sample(1) != first


def test_rollouts_continue_the_prefix_they_belong_to(model, tokenizer):
    """A model that repeats its last byte forever: each continuation tells its prefix."""

    class Repeats(torch.nn.Module):
        device, generation_config = torch.device("cpu"), model.generation_config

        def generate(self, input_ids, attention_mask, generation_config):
            assert (input_ids[attention_mask == 0] == tokenizer.pad_token_id).all()
            return torch.cat([input_ids, input_ids[:, -1:].repeat(1, generation_config.max_new_tokens)], dim=1)

    rollouts = TransformersRollouts(Repeats(), tokenizer, max_new_tokens=2, batch_size=3)
    prefixes = [tokenizer(text)["input_ids"] for text in ("long a", "b", "longer c")]
    assert rollouts(prefixes, 2) == [["aa"] * 2, ["bb"] * 2, ["cc"] * 2]


@pytest.mark.parametrize("field", ["max_new_tokens", "batch_size", "temperature"])
def test_rollout_settings_that_cannot_work(field, model, tokenizer):
    with pytest.raises(InputError, match=f"{field}: got 0"):
        TransformersRollouts(model, tokenizer, **{field: 0})
