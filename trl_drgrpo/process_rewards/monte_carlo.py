"""Monte-Carlo process rewards: the value of a prefix is how often the policy is correct from there.

    value v_k  = share of n rollouts from `prompt + steps 1..k` that the outcome verifier accepts
    reward     = v_k ("value") or v_k - v_{k-1} ("gain"; v_0 from the prompt alone)

The estimate that a tree search would make at that node (arXiv 2312.08935, 2410.01679). Where the last step ends the
completion no token can follow, so its value is the verifier's verdict on the completion itself. An EOS behind its
separator is a decision of its own, which a *value* does not know of: such a step is rolled out like the others. A
*gain* takes the verdict there, too: gains sum to `verdict - v_0`, and writing more steps earns nothing. The gain of
such a last step reads the EOS behind it (`is_causal`: values only). Equal prefixes, such as the
prompt of a group, are rolled out once per call. Cost: up to n rollouts per step, more than the training step itself.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from trl_drgrpo.common.errors import InputError, RewardError
from trl_drgrpo.process_rewards.step_columns import dataset_columns, row_of
from trl_drgrpo.process_rewards.texts import END_TOKENS, Cleaner, prompt_ids
from trl_drgrpo.rewards.contract import checked_reward, reward_name


@dataclass(frozen=True)
class _Prefix:
    """A prompt and the first steps of a completion, as it is rolled out and judged."""

    row: int
    key: Any  # equal for prefixes that are rolled out and judged alike
    rolled: str | tuple[int, ...]  # what is continued: the rendered text, or its token ids
    text: str  # the steps alone
    token_ids: tuple[int, ...]  # of the steps alone; empty without a tokenizer


class MonteCarloScorer:
    """Step rewards from rollouts of the policy, or of any other generator, and an outcome reward.

    Args:
        generate (`Callable`):
            Called as `generate(prefixes, k) -> list[list[str]]`: `k` sampled continuations of each prefix. Prefixes
            are lists of token ids if `tokenizer` is given, else texts. [`TransformersRollouts`] is one,
            [`TrainerRollouts`] another. One with a true attribute `collective` is called once per call of the scorer,
            be it without prefixes: its other processes wait for it.
        verifier (`Callable`):
            Outcome reward function with TRL's signature `f(prompts=, completions=, <columns>, **kwargs)`, synchronous.
            `completion_ids` are passed if `tokenizer` is given.
        k (`int`, *optional*, defaults to `8`): Rollouts per prefix.
        reward (`str`, *optional*, defaults to `"value"`): `"value"`, or `"gain"`: the difference to the step
            before.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The policy's. With it prefixes are exact to the token.
        render_prompt (`Callable`, *optional*): Turns a prompt into text, where there is no tokenizer and prompts are
            messages.
        accept_above (`float`, *optional*, defaults to `0.5`): A completion is accepted if its reward is larger. Of
            rollouts that the verifier cannot score (`None`) nothing is counted.
        keep_cache (`bool`, *optional*, defaults to `False`): Keep values between calls. Only for a generator that does
            not change; a policy in training does.
        name (`str`, *optional*, defaults to `"monte_carlo"`): Name in logs and metrics.

    Raises:
        `InputError`: `k` below 1, an unknown `reward`, an asynchronous verifier.
    """

    def __init__(
        self,
        generate: Callable[..., list[list[str]]],
        verifier: Callable[..., Any],
        *,
        k: int = 8,
        reward: Literal["value", "gain"] = "value",
        tokenizer: Any = None,
        render_prompt: Callable[[Any], str] | None = None,
        accept_above: float = 0.5,
        keep_cache: bool = False,
        name: str = "monte_carlo",
    ):
        if k < 1:
            raise InputError("k", str(k), "at least 1", "A share needs at least one rollout.")
        if reward not in ("value", "gain"):
            raise InputError("reward", repr(reward), "'value' or 'gain'", "Choose one of the two.")
        if inspect.iscoroutinefunction(verifier):
            remedy = "Rollouts are scored one by one: wrap it in a plain function."
            raise InputError("verifier", f"the asynchronous {reward_name(verifier)!r}", "a plain function", remedy)
        self.generate, self.verifier = generate, checked_reward(verifier)
        self.k, self.reward, self.accept_above = k, reward, accept_above
        self.tokenizer, self.render_prompt = tokenizer, render_prompt
        self.keep_cache = keep_cache
        self.__name__ = name
        self.is_causal = reward == "value"
        self._cache: dict[Any, float | None] = {}
        self._cleaner = Cleaner(END_TOKENS if tokenizer is None else [*tokenizer.all_special_tokens, *END_TOKENS])

    def on_trainer_built(self, trainer: Any) -> None:
        """Called by the trainer: rollouts that need one and have none take it."""
        if getattr(self.generate, "trainer", trainer) is None:
            self.generate.trainer = trainer  # type: ignore[attr-defined]

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        steps: Sequence[Sequence[str]],
        completion_ids: Sequence[Sequence[int]] | None = None,
        step_ends: Sequence[Sequence[int]] | None = None,
        trainer_state: Any = None,
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs: Any,
    ) -> list[list[float | None]]:
        """Estimate the value of every prefix, as a step reward function.

        Args:
            prompts (`B` texts or message lists): The prompts.
            completions (`B` texts or message lists): What the verifier judges for the last step of each row.
            steps (`B` sequences of `K_i` texts): The steps of each completion.
            completion_ids (`B` lists of ints, *optional*): Required with `tokenizer`.
            step_ends (`B` lists of `K_i` ints, *optional*): Inclusive token ends; required with `tokenizer`.
            trainer_state (*optional*): Handed to the verifier.
            log_metric (`Callable`, *optional*): Gets `process_rewards/<name>/rollouts`, how many this call sampled.
            **kwargs: Dataset columns, handed to the verifier; the rest is not read.

        Returns:
            `list[list[float | None]]`: `K_i` numbers per row, `"value"` in [0, 1], `"gain"` in [-1, 1]. `None` where
            the verifier could score nothing.

        Raises:
            `RewardError`: A verifier that fails, or a generator that returns something else than `k` texts per prefix.
        """
        columns = dataset_columns(kwargs, len(prompts))
        if not self.keep_cache:
            self._cache.clear()
        judge = _Judge(self.verifier, prompts, completions, columns, trainer_state)
        with_steps = [row for row in range(len(prompts)) if steps[row]]
        ended = [row for row in with_steps if self.reward == "gain" or not _goes_on(row, completion_ids, step_ends)]
        verdicts = judge.score(ended, [completions[row] for row in ended], _ids_of(completion_ids, ended))
        last = dict(zip(ended, map(self._accepted, verdicts), strict=True))
        prefixes = {
            row: self._prefixes(
                row, prompts[row], steps[row], completion_ids, step_ends, row_of(columns, row), row not in last
            )
            for row in with_steps
        }
        rollouts = self._fill_cache([prefix for row in with_steps for prefix in prefixes[row]], judge)
        if log_metric is not None:
            log_metric(f"process_rewards/{self.__name__}/rollouts", float(rollouts))
        rewards: list[list[float | None]] = [[] for _ in prompts]
        for row in with_steps:
            values = [self._cache[prefix.key] for prefix in prefixes[row]]
            values += [last[row]] if row in last else []
            rewards[row] = _gains(values) if self.reward == "gain" else values
        return rewards

    def _prefixes(
        self,
        row: int,
        prompt: Any,
        steps: Sequence[str],
        completion_ids: Any,
        step_ends: Any,
        columns: dict[str, Any],
        with_last: bool,
    ) -> list[_Prefix]:
        """The prefixes whose values are needed: behind every step, the last `with_last`; for gains the prompt too."""
        counts = range(0 if self.reward == "gain" else 1, len(steps) + with_last)
        texts = ["".join(steps[:count]) for count in counts]
        judged_alike = repr((prompt, sorted(columns.items(), key=lambda item: item[0])))
        if self.tokenizer is None:
            start = self._rendered(prompt)
            return [_Prefix(row, (judged_alike, start + text), start + text, text, ()) for text in texts]
        if completion_ids is None or step_ends is None:
            got, remedy = "no completion_ids or step_ends", "Pass them, or remove the tokenizer."
            raise InputError(f"step reward '{self.__name__}'", got, "both, because a tokenizer is set", remedy)
        start_ids = self._prompt_ids(prompt)
        prefixes: list[_Prefix] = []
        for count, text in zip(counts, texts, strict=True):
            token_ids = tuple(completion_ids[row][: step_ends[row][count - 1] + 1]) if count else ()
            rolled = start_ids + token_ids
            prefixes.append(_Prefix(row, (judged_alike, rolled), rolled, text, token_ids))
        return prefixes

    def _fill_cache(self, prefixes: Sequence[_Prefix], judge: "_Judge") -> int:
        """Roll out every prefix without a value once; returns how many rollouts that took."""
        wanted = list({prefix.key: prefix for prefix in prefixes if prefix.key not in self._cache}.values())
        if not wanted and not getattr(self.generate, "collective", False):
            return 0
        rolled = [prefix.rolled if isinstance(prefix.rolled, str) else list(prefix.rolled) for prefix in wanted]
        continuations = self._checked(self.generate(rolled, self.k), len(wanted))
        rows: list[int] = []
        texts: list[Any] = []
        token_ids: list[list[int]] = []
        for prefix, group in zip(wanted, continuations, strict=True):
            for continuation in group:
                rows.append(prefix.row)
                texts.append(judge.like_completion(prefix.row, self._cleaner.bare(prefix.text + continuation)))
                if self.tokenizer is not None:
                    more = self.tokenizer(continuation, add_special_tokens=False)["input_ids"]
                    token_ids.append([*prefix.token_ids, *more])
        verdicts = [self._accepted(r) for r in judge.score(rows, texts, token_ids if self.tokenizer else None)]
        for i, prefix in enumerate(wanted):
            counted = [v for v in verdicts[i * self.k : (i + 1) * self.k] if v is not None]
            self._cache[prefix.key] = sum(counted) / len(counted) if counted else None
        return len(rows)

    def _accepted(self, reward: float | None) -> float | None:
        return None if reward is None else float(reward > self.accept_above)

    def _rendered(self, prompt: Any) -> str:
        if self.render_prompt is not None:
            return self.render_prompt(prompt)
        if isinstance(prompt, str):
            return prompt
        remedy = "Pass the policy's tokenizer, or `render_prompt`."
        raise InputError(f"step reward '{self.__name__}'", "a prompt of messages", "a way to render it", remedy)

    def _prompt_ids(self, prompt: Any) -> tuple[int, ...]:
        return tuple(prompt_ids(prompt if self.render_prompt is None else self.render_prompt(prompt), self.tokenizer))

    def _checked(self, continuations: Any, num_prefixes: int) -> list[list[str]]:
        counts = [len(group) for group in continuations]
        if counts != [self.k] * num_prefixes:
            got = f"{len(counts)} groups of {sorted(set(counts))} texts"
            expected = f"{num_prefixes} groups of {self.k}"
            raise RewardError(f"generator of '{self.__name__}'", got, expected, "Return k texts for every prefix.")
        return continuations


class _Judge:
    """The verifier, and what it needs about each row of the call."""

    def __init__(
        self,
        verifier: Callable[..., Any],
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: dict[str, Sequence[Any]],
        trainer_state: Any,
    ):
        self.verifier, self.prompts, self.completions = verifier, prompts, completions
        self.columns, self.trainer_state = columns, trainer_state

    def score(self, rows: list[int], completions: list[Any], token_ids: Any) -> list[float | None]:
        """Rewards of completions that belong to the given rows; their metrics are nobody's."""
        if not rows:
            return []
        more = {name: [values[row] for row in rows] for name, values in self.columns.items()}
        if token_ids is not None:
            more["completion_ids"] = token_ids
        return self.verifier(
            prompts=[self.prompts[row] for row in rows],
            completions=completions,
            trainer_state=self.trainer_state,
            log_metric=_log_nothing,
            log_extra=_log_nothing,
            **more,
        )

    def like_completion(self, row: int, text: str) -> Any:
        """The text in the format of the row's completion: plain, or one message of the assistant."""
        return text if isinstance(self.completions[row], str) else [{"role": "assistant", "content": text}]


def _log_nothing(*args: Any) -> None:
    """Takes the place of the trainer's `log_metric` and `log_extra` for completions that are not trained on."""


def _ids_of(completion_ids: Any, rows: list[int]) -> list[list[int]] | None:
    return None if completion_ids is None else [list(completion_ids[row]) for row in rows]


def _goes_on(row: int, completion_ids: Any, step_ends: Any) -> bool:
    """Whether there are tokens behind the last step."""
    return None not in (completion_ids, step_ends) and len(completion_ids[row]) > step_ends[row][-1] + 1


def _gains(values: Sequence[float | None]) -> list[float | None]:
    """`v_k - v_{k-1}`; `None` where either is."""
    return [None if v is None or u is None else v - u for u, v in pairwise(values)]
