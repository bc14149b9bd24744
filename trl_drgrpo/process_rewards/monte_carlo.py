"""Monte-Carlo process rewards: the value of a prefix is how often the policy is correct from there.

    value v_k  = share of n rollouts from `prompt + steps 1..k` that the outcome verifier accepts
    reward     = v_k

The estimate that a tree search would make at that node (arXiv 2312.08935, 2410.01679). Where the last step ends the
completion no token can follow, so its value is the verifier's verdict on the completion itself. An EOS behind its
separator is a decision of its own, which a value does not know of: such a step is rolled out like the others. Equal
prefixes are rolled out once per call. Cost: up to n rollouts per step, more than the training step itself.

Rollouts come from any callable `generate(prefixes, k) -> list[list[str]]`. Two need no writing: `TransformersRollouts`
for a model in memory, and `TrainerRollouts` for the policy in training, sampled the way its trainer samples
completions (vLLM, DeepSpeed, FSDP included). Prefixes are lists of token ids.

`label_steps` makes labels for a process reward model: a step is good if at least one rollout from behind it is
accepted (the hard estimate of Math-Shepherd), its value is kept beside the label. A label is only as good as the model
is able and the verifier correct: a step from which the model merely guesses the answer counts as good.
"""

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.common.ranges import positive, refuse_outside, whole
from trl_drgrpo.process_rewards.continuations import ModelSampler, Request
from trl_drgrpo.process_rewards.prm_inputs import Cleaner, Prompt, completion_like, prompt_ids
from trl_drgrpo.process_rewards.step_scorer import LogMetric, RaggedRewards, dataset_columns, log_nothing
from trl_drgrpo.process_rewards.steps import DEFAULT_SEPARATOR, StepSegmenter
from trl_drgrpo.process_rewards.steps.segmenter import StepSpec, segmenter_without_turns
from trl_drgrpo.rewards.contract import checked_reward, reward_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState

    from trl_drgrpo.trainer import DrGRPOTrainer

Generate = Callable[..., list[list[str]]]  # (prefixes, k) -> k texts for each prefix


class TrainerRollouts:
    """Samples continuations from a trainer's policy, with the trainer's own backend and sampling settings.

    The trainer does not exist yet when its step reward functions are built; it introduces itself to the scorer:

    ```python
    scorer = MonteCarloScorer(TrainerRollouts(), verifier, tokenizer=tokenizer)
    trainer = DrGRPOTrainer(..., step_reward_funcs=scorer)
    ```

    Continuations have up to `max_completion_length` tokens, whatever the prefix has already. Sampling draws from the
    global random state, as the trainer's own does. All processes make the same number of calls to the backend.

    Args:
        trainer (`DrGRPOTrainer`, *optional*): The trainer; by default the one that the scorer is given to.
        batch_size (`int`, *optional*, defaults to `32`): Continuations per call of the backend and process; at least
            the `k` of one prefix. Raise it for vLLM, which schedules by itself.
    """

    # Read by the scorer, which calls it even without prefixes: other processes wait for it.
    collective = True

    def __init__(self, trainer: "DrGRPOTrainer | None" = None, *, batch_size: int = 32):
        refuse_outside("batch_size", batch_size, whole(1, remedy="Give a positive number."))
        self.trainer = trainer
        self.batch_size = batch_size

    def __call__(self, prefixes: Sequence[Sequence[int]], k: int) -> list[list[str]]:
        """Sample.

        Args:
            prefixes (`N` lists of token ids): What is continued; rendered prompt and the completion so far.
            k (`int`): Continuations per prefix.

        Returns:
            `list[list[str]]`: `N` lists of `k` continuations, without special tokens and without their prefix.

        Raises:
            `InputError`: Without a trainer.
        """
        trainer = self.trainer
        if trainer is None:
            remedy = "Pass the scorer to the trainer itself, or set `rollouts.trainer = trainer`."
            raise InputError("TrainerRollouts.trainer", "none", "the trainer whose policy is sampled", remedy)
        tokenizer: Any = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        accelerator = trainer.accelerator
        per_call = max(1, self.batch_size // k)
        # Rows of like length share a call, so that little is padded.
        order = sorted(range(len(prefixes)), key=lambda i: len(prefixes[i]))
        # Generation is collective: every process makes as many calls as the one with the most prefixes.
        calls = torch.tensor(math.ceil(len(prefixes) / per_call), device=accelerator.device)
        calls_of_processes: Any = accelerator.gather(calls)
        texts_of = {}
        for call in range(int(calls_of_processes.max())):
            batch = order[call * per_call : (call + 1) * per_call]
            rows = [prefixes[i] for i in batch]
            # The backend wants as many rows from every process. What is sampled for fillers is dropped.
            if accelerator.num_processes > 1:
                filler = [tokenizer.eos_token_id]
                if rows:
                    filler = rows[-1]
                rows += [filler] * (per_call - len(rows))
            # TRL's order: the k rows of a prefix beside each other.
            repeated = []
            for row in rows:
                repeated += [list(row)] * k
            sampled = trainer.sample_completions(repeated, num_generations=k)
            decoded = tokenizer.batch_decode(sampled, skip_special_tokens=True)
            for position, i in enumerate(batch):
                texts_of[i] = decoded[position * k : (position + 1) * k]
        return [texts_of[i] for i in range(len(prefixes))]


class TransformersRollouts:
    """Samples continuations; the same seed, prefixes and calls give the same texts.

    Args:
        model (`PreTrainedModel`): A causal language model; put into evaluation mode for the call and back after it.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        max_new_tokens (`int`, *optional*, defaults to `256`): Continuations are cut here.
        temperature (`float`, *optional*, defaults to `1.0`): Sampling temperature, > 0.
        top_p (`float`, *optional*, defaults to `1.0`): Nucleus of the sampling; 1.0 = the whole distribution.
        batch_size (`int`, *optional*, defaults to `32`): Continuations per call of `model.generate`.
        seed (`int`, *optional*, defaults to `0`): Every call is seeded with `seed` plus the number of calls before.
            The global random state is put back afterwards.
        generation (`Mapping`, *optional*): Further fields of a generation configuration, over those above.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        *,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        batch_size: int = 32,
        seed: int = 0,
        generation: Mapping[str, Any] | None = None,
    ):
        for field, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
            refuse_outside(field, value, whole(1, remedy="Give a positive number."))
        refuse_outside("temperature", temperature, positive(remedy="Greedy rollouts are all the same: raise it."))
        decoding = {
            "do_sample": True,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": 0,
            **(generation or {}),
        }
        self.sampler = ModelSampler(model, tokenizer, decoding, batch_size)
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self.seed = seed
        self.calls = 0

    def __call__(self, prefixes: Sequence[Sequence[int]], k: int) -> list[list[str]]:
        """Sample.

        Args:
            prefixes (`N` lists of token ids): What is continued.
            k (`int`): Continuations per prefix.

        Returns:
            `list[list[str]]`: `N` lists of `k` continuations, without special tokens and without their prefix.
        """
        # Another seed for each call, so that a prefix that comes again gets new continuations.
        seed = self.seed + self.calls
        self.calls += 1
        requests = []
        for prefix_ids in prefixes:
            requests.append(Request(tuple(prefix_ids), k, self.max_new_tokens, True, seed))
        texts = []
        for continuations in self.sampler(requests):
            ids = [list(continuation.token_ids) for continuation in continuations]
            texts.append(self.tokenizer.batch_decode(ids, skip_special_tokens=True))
        return texts


class _Prefix(NamedTuple):
    """A prompt and the first steps of a completion, to be rolled out and judged."""

    row: int
    prompt_ids: list[int]
    token_ids: list[int]  # of the steps
    text: str  # of the steps


class _Rollout(NamedTuple):
    """A finished completion for the verifier."""

    key: Any  # of its prefix
    row: int
    completion: Prompt
    token_ids: list[int]


class MonteCarloScorer:
    """Step rewards from rollouts of the policy, or of any other generator, and an outcome reward.

    Args:
        generate (`Callable`):
            Called as `generate(prefixes, k) -> list[list[str]]`: `k` sampled continuations of each prefix, a list of
            token ids. [`TransformersRollouts`] is one, [`TrainerRollouts`] another. One with a true attribute
            `collective` is called once per call of the scorer, be it without prefixes: its other processes wait for
            it.
        verifier (`Callable`):
            Outcome reward function with TRL's signature `f(prompts=, completions=, completion_ids=, <columns>,
            **kwargs)`, synchronous.
        tokenizer (`PreTrainedTokenizerBase`): The policy's.
        k (`int`, *optional*, defaults to `8`): Rollouts per prefix.
        accept_above (`float`, *optional*, defaults to `0.5`): A completion is accepted if its reward is larger.
            Rollouts that the verifier cannot score (`None`) are not counted.
        name (`str`, *optional*, defaults to `"monte_carlo"`): Name in logs and metrics.
        template (`Mapping`, *optional*): More that the chat template of the prompts is given.

    Attributes:
        is_causal (`bool`): Whether the score of a step reads no further than the end of that step, which
            `process_role="baseline"` requires: `True`.

    Raises:
        `InputError`: `k` below 1, an asynchronous verifier.
    """

    is_causal = True  # a value does not know whether the row stops

    def __init__(
        self,
        generate: Generate,
        verifier: Callable[..., Any],
        tokenizer: "PreTrainedTokenizerBase",
        *,
        k: int = 8,
        accept_above: float = 0.5,
        name: str = "monte_carlo",
        template: Mapping[str, Any] | None = None,
    ):
        refuse_outside("k", k, whole(1, remedy="A share needs at least one rollout."))
        if inspect.iscoroutinefunction(verifier):
            remedy = "Rollouts are scored one by one: wrap it in a plain function."
            raise InputError("verifier", f"the asynchronous {reward_name(verifier)!r}", "a plain function", remedy)
        self.generate = generate
        self.verifier = checked_reward(verifier)
        self.tokenizer = tokenizer
        self.k = k
        self.accept_above = accept_above
        self.template = template
        self.__name__ = name
        self._cleaner = Cleaner(tokenizer.all_special_tokens)

    def on_trainer_built(self, trainer: "DrGRPOTrainer") -> None:
        """Give the trainer, which calls this, to rollouts that need one and have none."""
        # A generator without the attribute needs no trainer.
        if getattr(self.generate, "trainer", trainer) is None:
            self.generate.trainer = trainer  # type: ignore[attr-defined]

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        steps: Sequence[Sequence[str]],
        completion_ids: Sequence[Sequence[int]],
        step_ends: Sequence[Sequence[int]],
        trainer_state: "TrainerState | None" = None,
        log_metric: LogMetric | None = None,
        **kwargs: Any,
    ) -> RaggedRewards:
        """Estimate the value of every prefix, as a step reward function.

        Args:
            prompts (`B` texts or message lists): The prompts.
            completions (`B` texts or message lists): What the verifier judges for the last step of each row.
            steps (`B` sequences of `K_i` texts): The steps of each completion.
            completion_ids (`B` lists of ints): The tokens of each completion.
            step_ends (`B` lists of `K_i` ints): Inclusive token ends.
            trainer_state (*optional*): Handed to the verifier.
            log_metric (`Callable`, *optional*): Gets `process_rewards/<name>/rollouts`, how many this call sampled.
            **kwargs: Dataset columns, handed to the verifier; the rest is not read.

        Returns:
            `list[list[float | None]]`: `K_i` numbers per row, from 0 to 1; `None` where the verifier could score
            nothing.

        Raises:
            `RewardError`: A verifier that fails, or a generator that returns something else than `k` texts per prefix.
        """
        columns = dataset_columns(kwargs, len(prompts))
        keys = []  # of each step
        prefixes = {}  # by key: equal ones are rolled out once
        rollouts = []
        for row, texts in enumerate(steps):
            keys.append([])
            if not texts:
                continue
            prompt = prompt_ids(prompts[row], self.tokenizer, self.template)
            ids = list(completion_ids[row])
            # Equal tokens are one prefix only where the verifier sees equal columns too. As text, since a column may
            # hold what cannot be hashed.
            row_values = sorted((name, values[row]) for name, values in columns.items())
            verifier_input = repr((prompts[row], row_values))
            for count, end in enumerate(step_ends[row], start=1):
                if count == len(texts) and end + 1 == len(ids):  # no token can follow: the completion is its rollout
                    keys[row].append(row)
                    rollouts.append(_Rollout(row, row, completions[row], ids))
                else:
                    token_ids = ids[: end + 1]
                    key = (verifier_input, *prompt, *token_ids)
                    keys[row].append(key)
                    prefixes[key] = _Prefix(row, prompt, token_ids, "".join(texts[:count]))
        if log_metric is not None:
            log_metric(f"process_rewards/{self.__name__}/rollouts", float(self.k * len(prefixes)))
        continuations = self._rolled_out(list(prefixes.values()))
        for (key, prefix), texts in zip(prefixes.items(), continuations, strict=True):
            for text in texts:
                # The verifier sees what it would see in training: text without special tokens, in the prompt's form.
                whole_text = self._cleaner.bare(prefix.text + text)
                completion = completion_like(completions[prefix.row], whole_text)
                text_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
                rollouts.append(_Rollout(key, prefix.row, completion, [*prefix.token_ids, *text_ids]))
        # The verifier is called once, with the rollouts of all prefixes.
        rows = [rollout.row for rollout in rollouts]
        rewards: Any = rows and self.verifier(
            prompts=[prompts[row] for row in rows],
            completions=[rollout.completion for rollout in rollouts],
            completion_ids=[rollout.token_ids for rollout in rollouts],
            trainer_state=trainer_state,
            log_metric=log_nothing,  # these completions are not trained on
            log_extra=log_nothing,
            **{name: [values[row] for row in rows] for name, values in columns.items()},
        )
        verdicts_on = defaultdict(list)  # by key
        for rollout, reward in zip(rollouts, rewards, strict=True):
            if reward is not None:
                verdicts_on[rollout.key].append(reward > self.accept_above)
        values = []
        for row_keys in keys:
            values.append([])
            for key in row_keys:
                verdicts = verdicts_on[key]
                value = None  # the verifier could score nothing
                if verdicts:
                    value = sum(verdicts) / len(verdicts)
                values[-1].append(value)
        return values

    def _rolled_out(self, prefixes: list[_Prefix]) -> list[list[str]]:
        """Return `k` continuations of each prefix."""
        if not prefixes and not getattr(self.generate, "collective", False):
            return []
        token_ids = [[*prefix.prompt_ids, *prefix.token_ids] for prefix in prefixes]
        continuations = self.generate(token_ids, self.k)
        counts = [len(group) for group in continuations]
        if counts != [self.k] * len(prefixes):
            field = f"generator of '{self.__name__}'"
            got = f"{len(counts)} groups of {sorted(set(counts))} texts"
            expected = f"{len(prefixes)} groups of {self.k}"
            remedy = "Return k texts for every prefix."
            raise RewardError(field, got, expected, remedy)
        return continuations


_RESULT_COLUMNS = ("steps", "labels", "values", "completions")  # a row's own columns of these names are not passed on
_CHUNK = 32  # rows whose completions are rolled out together


def label_steps(
    rows: Sequence[Mapping[str, Any]],
    generate: Generate,
    verifier: Callable[..., Any],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    rollouts: int = 8,
    completions: int = 1,
    separator: StepSpec = DEFAULT_SEPARATOR,
    template: Mapping[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """Label the steps of completions by rollouts.

    Args:
        rows (`Sequence[Mapping]`): Dataset rows with `prompt` (text or messages); further columns go to the verifier.
            A row that has `steps` is labeled as it is, the others are completed by the model.
        generate (`Callable`): As for [`MonteCarloScorer`]; it is given token ids.
        verifier (`Callable`): Outcome reward function with TRL's signature.
        tokenizer (`PreTrainedTokenizerBase`): The model's.
        rollouts (`int`, *optional*, defaults to `8`): Per prefix.
        completions (`int`, *optional*, defaults to `1`): Sampled per prompt.
        separator (*optional*, defaults to an empty line): End of a step, as in [`step_segmenter`]; not `"turn"`.
        template (`Mapping`, *optional*): More that the chat template is given.

    Yields:
        `dict`: The row's columns with `steps` (texts without separator), `labels` (`bool`: value > 0; `None` where
        the verifier could score nothing) and `values` (`float`, 0 to 1). The last value is the verdict on the
        completion. Completions without text are left out. Steps are those that a run cuts: of tokens, by the same
        segmenter.

    Raises:
        `InputError`: A row without `prompt`, a separator that [`step_segmenter`] refuses.
        `RewardError`: A verifier that fails.
    """
    segmenter = segmenter_without_turns(separator, "separator")
    # All rows are checked before the first one is sampled.
    for index, row in enumerate(rows):
        if "prompt" not in row:
            remedy = "Rename the column that holds it."
            raise InputError(f"row {index}", f"the columns {sorted(row)}", "a column 'prompt'", remedy)
    scorer = MonteCarloScorer(generate, verifier, tokenizer, k=rollouts, template=template)
    for start in range(0, len(rows), _CHUNK):
        chunk = _completed(rows[start : start + _CHUNK], scorer, completions, segmenter)
        columns_of_rows = []
        for completed in chunk:
            row = dict(completed.row)
            for name in _RESULT_COLUMNS:
                row.pop(name, None)
            columns_of_rows.append(row)
        # Rows become columns, as a trainer passes them. A row may lack one.
        columns = {}
        for name in dict.fromkeys(chain(*columns_of_rows)):
            columns[name] = [row.get(name) for row in columns_of_rows]
        prompts = columns.pop("prompt", [])
        texts = ["".join(completed.steps) for completed in chunk]
        values = scorer(
            prompts=prompts,
            completions=list(map(completion_like, prompts, texts)),
            steps=[completed.steps for completed in chunk],
            completion_ids=[completed.token_ids for completed in chunk],
            step_ends=[completed.ends for completed in chunk],
            **columns,
        )
        for row, completed, step_values in zip(columns_of_rows, chunk, values, strict=True):
            # One accepted rollout is enough: the hard estimate.
            labels = []
            for value in step_values:
                label = None
                if value is not None:
                    label = value > 0
                labels.append(label)
            steps = list(map(segmenter.rule.without_end, completed.steps))
            yield {**row, "steps": steps, "labels": labels, "values": step_values}


class _Completed(NamedTuple):
    """A row with the steps of a completion, its closing left out."""

    row: Mapping[str, Any]
    steps: list[str]
    token_ids: list[int]
    ends: list[int]  # inclusive, of the steps


def _completed(
    rows: Sequence[Mapping[str, Any]], scorer: MonteCarloScorer, completions: int, segmenter: StepSegmenter
) -> list[_Completed]:
    """Return the rows with the steps that they came with, or with sampled steps, which are cut as in training."""
    tokenizer = scorer.tokenizer
    rule = segmenter.rule
    # All prompts are sampled in one call; the rows take the texts back in their order.
    prompts = [prompt_ids(row["prompt"], tokenizer, scorer.template) for row in rows if "steps" not in row]
    sampled: Iterator[list[str]] = iter(())
    if prompts:
        sampled = iter(scorer.generate(prompts, completions))
    completed = []
    for row in rows:
        if "steps" not in row:
            for text in next(sampled):
                ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
                cut = segmenter(ids, tokenizer)
                if "".join(cut.texts).strip():
                    steps = list(cut.texts)
                    ends = list(cut.ends)
                    # Without the closing (EOS, white space), so the last value is the verdict on the completion.
                    completed.append(_Completed(row, steps, ids[: ends[-1] + 1], ends))
        elif len(row["steps"]) > 0:
            # Every step but the last gets its separator. Tokenized one by one, a step ends where a token ends.
            *bare, last = [rule.without_end(str(step)) for step in row["steps"]]
            steps = [*map(rule.with_end, bare), last]
            ids = []
            ends = []
            for step in steps:
                ids += tokenizer(step, add_special_tokens=False)["input_ids"]
                ends.append(len(ids) - 1)
            completed.append(_Completed(row, steps, ids, ends))
    return completed
