"""Search: budgets and counts against a stub that counts, the strategies on trees that are known, both samplers."""

import random
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm_server import Refused, Server

from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.process_rewards.continuations import Request
from trl_drgrpo.process_rewards.steps import step_segmenter
from trl_drgrpo.process_rewards.verifiers import step_verifier
from trl_drgrpo.search import collect
from trl_drgrpo.search.collecting import search_rows, sft_rows, summary
from trl_drgrpo.search.problem import STRATEGIES, Node, SearchSettings
from trl_drgrpo.search.sampling import ServerSampler, StepEnd, StepSampler
from trl_drgrpo.search.strategies import Appraiser, score, select


class Stub:
    """Writes by a function from the text so far to the next character (None: end token), and counts tokens."""

    def __init__(self, tokenizer, write, prompt="?", separator="\n"):
        self.tokenizer, self.write, self.prompt = tokenizer, write, prompt
        self.step_end = StepEnd(step_segmenter(separator), tokenizer)
        self.sampled = 0
        self.calls = []

    def __call__(self, requests):
        self.calls.append(requests)
        rngs = [[random.Random(f"{each.seed}/{i}") for i in range(each.count)] for each in requests]
        return [[self._one(each, rng) for rng in own] for each, own in zip(requests, rngs, strict=True)]

    def _one(self, request, rng):
        tokens = []
        text = self.tokenizer.decode(list(request.prefix))[len(self.prompt) :]
        while True:
            char = self.write(text, rng)
            text += char or ""
            tokens.append(self.tokenizer.eos_token_id if char is None else self.tokenizer.encode(char)[0])
            self.sampled += 1
            if (found := self.step_end.ended(tokens, request, char is None)) is not None:
                return found


def letters(text, rng):
    return rng.choice(["a", "b", "é", "\n", None])  # of é, two tokens, the first one alone


def tree_of(depth):
    """Every completion is `depth` lines of one letter, a or b."""

    def write(text, rng):
        if text.count("\n") == depth:
            return None
        return "\n" if text and text[-1] != "\n" else rng.choice("ab")

    return write


@step_verifier
def prm(prompt, previous_steps, step):
    """Scores of a tree of letters; none of the end, a step of its own."""
    return {"a": 0.2, "b": 0.8, "": None}[step.strip()]


def run(stub, rows=1, verifier=None, prm=None, **settings):
    chosen = SearchSettings(**{"step_separator": "\n", **settings})
    problems = [{"prompt": stub.prompt} for _ in range(rows)]
    return list(search_rows(problems, stub, stub.tokenizer, Appraiser(chosen, verifier, prm)))


def has_a(completions, **kwargs):
    return [float("a" in text) for text in completions]


# Budget and counts ---------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(
    chosen=st.fixed_dictionaries(
        {
            "strategy": st.sampled_from(STRATEGIES),
            "width": st.integers(1, 3),
            "children": st.integers(1, 4),
            "step_separator": st.sampled_from(["\n", "tokens:3", "re:\\n(?=a)"]),
            "seed": st.integers(0, 5),
        }
    ),
    longest=st.integers(1, 30),
    extra=st.integers(0, 90),
    with_prm=st.booleans(),
)
@example({"strategy": "best_of_n", "step_separator": "tokens:3", "seed": 1}, 26, 74, False)  # "\n" * 3 is a step
def test_counts_are_what_was_sampled_and_never_above_the_budget(tokenizer, chosen, longest, extra, with_prm):
    stub = Stub(tokenizer, letters, separator=chosen["step_separator"])
    prm = step_verifier(lambda prompt, previous_steps, step: (len(step) % 4) / 3 if "b" in step else None, name="prm")
    sizes = {"budget_tokens": longest + extra, "max_completion_length": longest, "problems_at_once": 2}
    problems = run(stub, rows=3, verifier=has_a, prm=prm if with_prm else None, **sizes, **chosen)
    assert len(problems) == 3
    counts = [rows[0]["search"] for rows in problems]
    assert sum(each["sampled_tokens"] for each in counts) == stub.sampled
    assert all(0 < each["kept_tokens"] <= each["sampled_tokens"] <= longest + extra for each in counts)
    sent = sum(len(request.prefix) * request.count for call in stub.calls for request in call)
    assert sum(each["prompt_tokens"] for each in counts) == sent
    for rows in problems:
        assert sum(row["selected"] for row in rows) == 1
        # Bytes that are no text look alike; a rule that looks ahead may cut one text in two ways.
        readable = [row for row in rows if "\ufffd" not in row["completion"]]
        told = [(row["completion"], row["finish_reason"], *row["steps"]) for row in readable]
        assert len(set(told)) == len(told)
        for row in rows:
            assert len(row["steps"]) == len(row["labels"]) == len(row["values"]) == len(row["visits"])
            assert "".join(row["steps"]).strip() == row["completion"].strip()
            assert row["correct"] == ("a" in row["completion"])
            assert sorted(row["visits"], reverse=True) == row["visits"]  # a visit of a step is one of those above
            if row["correct"]:
                assert all(row["labels"])
            assert len(row["completion"]) <= longest


def test_tokens_of_a_completion_are_kept_back_until_one_is_finished(tokenizer):
    def write(text, rng):  # a step of 5 tokens, 4 steps
        return None if text.count("\n") == 4 else "\n" if len(text) % 5 == 4 else rng.choice("abcdefgh")

    stub = Stub(tokenizer, write)
    prm = step_verifier(lambda prompt, previous_steps, step: 0.5, name="prm")
    [[row]] = run(stub, prm=prm, strategy="puct", budget_tokens=70, max_completion_length=30, children=4)
    # 70 - 30 pay for two expansions of 4 x 5 tokens; then the best path is written to its end from what was kept back
    assert [len(call) for call in stub.calls] == [1, 1, 1]
    asked = [(request.count, request.limit, request.to_end) for [request] in stub.calls]
    assert asked == [(4, 10, False), (4, 5, False), (1, 20, True)]
    assert row["search"]["sampled_tokens"] == 20 + 20 + 11
    assert row["finish_reason"] == "stop"


def test_a_step_that_the_budget_cuts_short_is_counted_and_thrown_away(tokenizer):
    stub = Stub(tokenizer, lambda text, rng: rng.choice("ab"))  # no step ever ends
    prm = step_verifier(lambda prompt, previous_steps, step: 0.5, name="prm")
    [[row]] = run(stub, prm=prm, strategy="beam", budget_tokens=30, max_completion_length=20, width=1, children=2)
    assert row["search"]["sampled_tokens"] == 10 + 20
    assert row["search"]["kept_tokens"] == 20
    assert (len(row["completion"]), row["finish_reason"]) == (20, "length")


# Strategies ----------------------------------------------------------------------------------------------------------


def test_puct_with_a_perfect_value_finds_the_right_leaf(tokenizer):
    goal = "abbabaabba"

    @step_verifier
    def perfect(prompt, previous_steps, step):
        text = "".join((*previous_steps, step)).replace("\n", "").replace("<|im_end|>", "")
        return float(goal.startswith(text))

    def is_goal(completions, **kwargs):
        return [float(text.replace("\n", "") == goal) for text in completions]

    sizes = {"budget_tokens": 400, "max_completion_length": 21, "children": 5, "exploration": 0.2}
    [rows] = run(Stub(tokenizer, tree_of(10)), verifier=is_goal, prm=perfect, strategy="puct", **sizes)
    (selected,) = [row for row in rows if row["selected"]]
    assert selected["correct"]
    assert selected["labels"] == [True] * 10
    # 1 of 1024 leaves: the same tokens without a value do not find it
    [rows] = run(Stub(tokenizer, tree_of(10)), verifier=is_goal, strategy="best_of_n", **sizes)
    assert not any(row["correct"] for row in rows)
    # nor does one that knows nothing select it among what it finds
    blind = step_verifier(lambda prompt, previous_steps, step: 0.5, name="blind")
    [rows] = run(Stub(tokenizer, tree_of(10)), verifier=is_goal, prm=blind, strategy="puct", **sizes)
    assert not any(row["correct"] and row["selected"] for row in rows)


def test_puct_follows_its_formula():
    root = Node(is_expanded=True, visits=4, total=2.0)
    for samples, visits, total in ((3, 3, 1.5), (1, 1, 0.0)):
        root.children.append(Node(parent=root, samples=samples, visits=visits, total=total))
    rare = root.children[1]
    assert score(rare, 2.0) == 0.0 + 2.0 * 0.25 * 4**0.5 / 2
    assert select(root, 0.0) is root.children[0]
    root.children[0].visits, root.children[0].total = 30, 3.0
    assert select(root, 2.0) is rare  # 0.1 + 2 * .75 * sqrt(31) / 31 = .37 against 2 * .25 * sqrt(31) / 2 = 1.39
    rare.is_closed = True
    assert select(root, 2.0) is root.children[0]
    rare.visits, rare.total = 0, 0.0
    assert score(rare, 0.0) == 0.5  # without a value of its own: its parent's


def test_roll_outs_are_values_and_steps_at_once(tokenizer):
    def correct(completions, **kwargs):
        return [float(text.startswith("a")) for text in completions]

    stub = Stub(tokenizer, tree_of(3))
    sizes = {"budget_tokens": 140, "max_completion_length": 7, "children": 6, "exploration": 0.1}
    [rows] = run(stub, verifier=correct, strategy="puct", **sizes)
    assert all(request.to_end for call in stub.calls for request in call)
    for row in rows:
        assert set(row["values"][1:]) == {row["outcome"]} == {row["values"][0]}  # the first letter decides
        assert row["labels"] == [row["correct"]] * 3
    by_letter = {row["steps"][0]: row["visits"][0] for row in rows}
    assert by_letter["a\n"] > 2 * by_letter["b\n"]  # the tree grows where it is correct
    assert sum(by_letter.values()) == sum(request.count for call in stub.calls for request in call)


def test_a_tree_without_an_open_node_ends_the_search(tokenizer):
    stub = Stub(tokenizer, tree_of(1))
    sizes = {"budget_tokens": 10_000, "max_completion_length": 3, "children": 8, "path_value": "last"}
    [rows] = run(stub, prm=prm, strategy="puct", **sizes)
    assert [row["completion"] for row in sorted(rows, key=lambda row: row["completion"])] == ["a\n", "b\n"]
    assert stub.sampled == 8 * 2 + 2 * 8  # the root, and the end behind each letter
    assert [row["completion"] for row in rows if row["selected"]] == ["b\n"]


def test_a_beam_keeps_the_best_and_begins_anew_while_the_budget_lasts(tokenizer):
    stub = Stub(tokenizer, tree_of(2))
    sizes = {"budget_tokens": 200, "max_completion_length": 5, "width": 2, "children": 4, "path_value": "product"}
    [rows] = run(stub, prm=prm, strategy="beam", **sizes)
    assert {request.count for request in stub.calls[0]} == {8}
    assert {request.count for request in stub.calls[1]} == {4}
    prefixes = [[tokenizer.decode(list(request.prefix))[1:] for request in call] for call in stub.calls]
    assert prefixes[:3] == [[""], ["b\n", "a\n"], ["b\nb\n", "b\na\n"]] or prefixes[2] == ["b\nb\n", "a\nb\n"]
    assert prefixes[3] == [""]
    (selected,) = [row for row in rows if row["selected"]]
    assert selected["completion"] == "b\nb\n"
    assert selected["values"][-1] == pytest.approx(0.64)


def test_equal_steps_are_one_node_and_their_visits_add_up(tokenizer):
    stub = Stub(tokenizer, lambda text, rng: None if text else "x")
    [[row]] = run(stub, verifier=has_a, strategy="best_of_n", budget_tokens=20, max_completion_length=2)
    assert row["visits"] == [10]
    assert (row["search"]["sampled_tokens"], row["search"]["kept_tokens"]) == (20, 2)


# Values --------------------------------------------------------------------------------------------------------------


def test_without_a_verifier_there_are_no_labels_and_the_values_select(tokenizer):
    [rows] = run(Stub(tokenizer, tree_of(1)), prm=prm, strategy="best_of_n", budget_tokens=30, max_completion_length=3)
    assert {row["outcome"] for row in rows} == {None} == {label for row in rows for label in row["labels"]}
    assert [row["prm_scores"] for row in rows if row["selected"]] == [[0.8]]
    assert sft_rows(rows) == []
    assert "pass_rate_any" not in summary(rows)


def test_a_verifier_that_fails(tokenizer):
    def broken(completions, **kwargs):
        raise KeyError("answer")

    sizes = {"strategy": "best_of_n", "budget_tokens": 6, "max_completion_length": 3}
    with pytest.raises(RewardError, match="reward function 'broken': got KeyError"):
        run(Stub(tokenizer, tree_of(1)), verifier=broken, **sizes)
    [rows] = run(Stub(tokenizer, tree_of(1)), verifier=broken, on_reward_error="unscorable", **sizes)
    assert {row["correct"] for row in rows} == {None}


def test_an_asynchronous_verifier(tokenizer):
    async def later(completions, **kwargs):
        return has_a(completions)

    sizes = {"strategy": "beam", "budget_tokens": 40, "max_completion_length": 3}
    [rows] = run(Stub(tokenizer, tree_of(1)), verifier=later, **sizes)
    assert {row["completion"]: row["correct"] for row in rows} == {"a\n": True, "b\n": False}


# A model in memory ---------------------------------------------------------------------------------------------------


def test_a_model_samples_steps_up_to_their_end(model, tokenizer):
    prefix = tuple(tokenizer.encode("1+1="))
    eos = set(model.generation_config.eos_token_id)
    for rule, looks_ahead in (("tokens:3", False), ("re:[a-zA-Z](?=[^a-z])", True)):
        step_end = StepEnd(step_segmenter(rule), tokenizer)
        sampler = StepSampler(model, step_end, {"do_sample": True, "top_k": 0}, batch_size=5)
        requests = [Request(prefix, 6, 9, False, 7), Request(prefix + prefix, 5, 12, True, 8)]
        steps, whole = sampler(requests)
        assert [steps, whole] == sampler(requests)  # seeded
        assert (len(steps), len(whole)) == (6, 5)
        for each in [*steps, *whole]:
            assert (each.token_ids[-1] in eos) == (each.end == "stop")
            assert not eos & set(each.token_ids[:-1])
            assert each.end == "step" or len(each.token_ids) == each.sampled
        assert all(each.end != "step" for each in whole)
        assert all(len(each.token_ids) == 12 for each in whole if each.end == "length")
        ended = [each for each in steps if each.end == "step"]
        assert ended
        if looks_ahead:
            assert any(each.sampled > len(each.token_ids) for each in ended)
        else:
            assert all(each.sampled == len(each.token_ids) >= 3 for each in ended)  # more inside a character
            assert any(len(each.token_ids) == 3 for each in ended)


def test_a_loaded_model_is_searched(model, tokenizer):
    model.train()
    rows = [{"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}, {"prompt": "2+2", "answer": "4"}]
    seen = []

    def verifier(prompts, completions, completion_ids, answer, **kwargs):
        seen.extend(zip(prompts, completions, completion_ids, answer, strict=True))
        return [1.0] * len(prompts)

    sizes = {"strategy": "puct", "budget_tokens": 60, "max_completion_length": 15, "step_separator": "tokens:4"}
    found = list(collect(rows, model, tokenizer, verifier=verifier, **sizes))
    assert model.training
    assert [row["completion"][0]["role"] for row in found[0]] == ["assistant"] * len(found[0])
    assert all(isinstance(row["completion"], str) for row in found[1])
    for _, completion, ids, answer in seen:
        text = completion if isinstance(completion, str) else completion[0]["content"]
        assert answer == ("4" if isinstance(completion, str) else "2")
        assert text == tokenizer.decode(ids, skip_special_tokens=True)
    assert len(sft_rows(found[0])) == sum(row["finish_reason"] == "stop" for row in found[0])


@settings(max_examples=40)
@given(text=st.text("ab\n\r é.", max_size=12), separator=st.sampled_from(["\n", "\n\n", ["b\n", "é"], ". ", "a"]))
def test_a_step_ends_where_the_segmenter_says_token_by_token(text, separator, tokenizer):
    segmenter = step_segmenter([separator] if isinstance(separator, str) else separator)
    step_end, ids = StepEnd(segmenter, tokenizer), tokenizer.encode(text)
    for count in range(1, len(ids) + 1):
        so_far = ids[:count]
        end = segmenter([*so_far, tokenizer.encode("z")[0]], tokenizer).ends[0] + 1
        assert step_end(so_far) == (end if end <= count else None)
        if end <= count:
            assert end == count
            break


# A vLLM server -------------------------------------------------------------------------------------------------------


class Completions(Server):
    """`/v1/completions` of a search: text of its own, cut as vLLM cuts it."""

    def __init__(self, tokenizer, write):
        super().__init__(SimpleNamespace())
        self.tokenizer, self.write = tokenizer, write
        self.sampled = 0

    def post_v1_completions(self, body):
        self.completions.append(dict(body))
        if not (body["model"] == "tiny" and body["return_token_ids"] and body["n"] == 1):
            raise Refused("/v1/completions")
        rng, stops, ids = random.Random(body["seed"]), body.get("stop", []), []
        before = self.tokenizer.decode(body["prompt"])[1:]
        reason, stop_reason = "length", None
        while len(ids) < body["max_tokens"] and reason == "length":
            text = self.tokenizer.decode(ids)
            char = self.write(before + text, rng)
            ids.append(self.tokenizer.eos_token_id if char is None else self.tokenizer.encode(char)[0])
            if char is None:
                reason = "stop"
            elif any((text + char).endswith(stop) for stop in stops):
                reason, stop_reason = "stop", next(stop for stop in stops if (text + char).endswith(stop))
        self.sampled += len(ids)
        return {"choices": [{"token_ids": ids, "finish_reason": reason, "stop_reason": stop_reason}]}


def served(server, tokenizer, rule="\n"):
    url = server.settings["vllm_server_base_url"]
    return ServerSampler(url, "tiny", StepEnd(step_segmenter(rule), tokenizer), {"temperature": 1.0, "top_p": 1.0}, 4)


@pytest.mark.parametrize("rule", ["\n", "re:\\n(?=.)"])
def test_a_server_samples_steps_with_token_ids_in_and_out(rule, tokenizer):
    sizes = {"budget_tokens": 300, "max_completion_length": 9, "step_separator": rule, "strategy": "puct"}
    chosen = SearchSettings(**sizes)
    with Completions(tokenizer, tree_of(4)) as server:
        sampler = served(server, tokenizer, rule)
        [rows] = search_rows([{"prompt": "?"}], sampler, tokenizer, Appraiser(chosen, None, prm))
    assert rows[0]["search"]["sampled_tokens"] == server.sampled  # what was cut off behind a step's end, too
    assert {row["completion"].count("\n") for row in rows} == {4}
    assert all(isinstance(body["prompt"][0], int) for body in server.completions)
    assert all(body["max_tokens"] <= 9 for body in server.completions)
    assert ("stop" in server.completions[0]) == (rule == "\n")
    assert len({body["seed"] for body in server.completions}) > 10


def test_a_stop_string_that_ends_no_step_is_gone_past(tokenizer):
    written = {"": "\n", "\n": "a", "\na": "\n"}
    with Completions(tokenizer, lambda text, rng: written.get(text)) as server:
        [[step]] = served(server, tokenizer)([Request(tuple(tokenizer.encode("?")), 1, 8, False, 0)])
    assert (tokenizer.decode(list(step.token_ids)), step.sampled, step.end) == ("\na\n", 3, "step")
    assert [len(body["prompt"]) for body in server.completions] == [1, 2]


def test_a_server_that_is_not_there_or_answers_something_else(tokenizer):
    request = Request((1, 2), 1, 4, True, 0)
    with Completions(tokenizer, lambda text, rng: None) as server:
        server.post_v1_completions = lambda body: {"choices": [{"text": "a", "finish_reason": "stop"}]}
        with pytest.raises(InputError, match="vllm_server_base_url: got a reply without token_ids"):
            served(server, tokenizer)([request])
        server.post_v1_completions = lambda body: 1 / 0
        with pytest.raises(InputError, match="HTTP 400"):
            served(server, tokenizer)([request])
    with pytest.raises(InputError, match="vllm_server_base_url: got an address of another form"):
        ServerSampler("localhost:1", "m", StepEnd(step_segmenter("\n"), tokenizer), {}, 1)


# Settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "puckt"}, "strategy: got 'puckt'; expected one of best_of_n, beam, puct. Did you mean puct?"),
        ({"budget_tokens": 63}, "budget_tokens: got 63; .* at least 64. It must cover at least one"),
        ({"width": 0}, "width: got 0; expected a whole number, at least 1"),
        ({"path_value": "max"}, "path_value: got 'max'; expected one of min, product, last"),
        ({"temperature": 0.0}, "temperature: got 0.0; .* Greedy decoding gives a single answer"),
        ({"exploration": -1.0}, "exploration: got -1.0"),
        ({"step_separator": "turn"}, "step_separator: got 'turn'"),
        ({"on_reward_error": "ignore"}, "on_error: got 'ignore'"),
        ({"verifier": None}, "reward_funcs: got none, and no prm; .* Add one: its values guide"),
        ({"rows": []}, "dataset_name: got no rows"),
        ({"rows": [{"question": "?"}]}, r"dataset_name: got null as the prompt in row 0 "),
        ({"rows": [{"prompt": "?", "values": 1}]}, "dataset_name: got a column 'values'"),
    ],
)
def test_bad_search_settings_are_refused_before_a_model_loads(changes, message):
    given = {"strategy": "puct", "budget_tokens": 64, "max_completion_length": 64, "verifier": has_a, **changes}
    rows = given.pop("rows", [{"prompt": "?"}])
    with pytest.raises(InputError, match=message):
        collect(rows, "no-such-model", **given)
