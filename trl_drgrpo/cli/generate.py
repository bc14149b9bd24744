"""`trl-drgrpo generate`: answers of a trained model to a prompt, to the lines of stdin, or in a dialog.

Answer a prompt as the model was trained to: with the template, the system prompt and the sampling of the run's recipe.
Without a prompt the lines of stdin are the prompts; on a terminal it asks for them.

The answers go to standard output, everything else to standard error. Exit codes: 0 done, 2 bad input.

Every prompt is one by itself: the model sees no earlier ones. Example:

  trl-drgrpo generate --model runs/first "What is 2 + 3?"
"""

import argparse
import secrets
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trl_drgrpo.cli import console
from trl_drgrpo.cli.batch import Row, refuse_low_numbers
from trl_drgrpo.cli.data import as_prompted, check_slots
from trl_drgrpo.cli.run_keys import ANSWER_KEYS, add_keys, read_settings, was_trained_on_messages
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.evaluation import models
from trl_drgrpo.process_rewards.prm_inputs import prompt_ids
from trl_drgrpo.rewards.texts import completion_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trl_drgrpo.process_rewards.continuations import Request, Sampler


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options to a parser."""
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="one prompt per argument")
    add_keys(parser, ANSWER_KEYS)
    add = parser.add_argument
    console.add_default(parser, "--num_samples", 1, "answers per prompt")
    add("--seed", type=int, help="sampling seed (default: random)")
    add(
        "--vllm_server_base_url",
        metavar="URL",
        help="answer with a vLLM server that serves this model, or the base of this adapter",
    )
    add("--chat", action=argparse.BooleanOptionalAction, help="prompt as a user's message (default: as in the run)")


def run(args: argparse.Namespace) -> int:
    """Load and answer."""
    refuse_low_numbers(args, num_samples=1)
    settings = read_settings(args)
    from trl_drgrpo.process_rewards.continuations import Request
    from trl_drgrpo.single_gpu.vocabulary import context_length

    with console.stdout_to_stderr():
        tokenizer = models.load_tokenizer(settings.model, settings.loading)
        # Ask as in the run; of a model without one, as a user where the tokenizer knows users.
        chat = args.chat
        if chat is None and settings.values.get("prompt_template") is None:
            chat = was_trained_on_messages(settings.model)
            if chat is None:
                chat = getattr(tokenizer, "chat_template", None) is not None
        context = context_length(models.load_config(settings.model, settings.loading))

        def prepared(text: str) -> tuple[Row, tuple[int, ...]]:
            """Return a prompt as a row of the dataset that the run would have made of it, and its tokens."""
            row: Row = {"prompt": text}
            check_slots(row, settings.prompting["prompt_template"])
            row |= as_prompted(row, **settings.prompting)
            if chat and isinstance(row["prompt"], str):
                row["prompt"] = [{"role": "user", "content": row["prompt"]}]
            prefix = tuple(prompt_ids(row["prompt"], tokenizer, settings.template))
            if context is not None and len(prefix) >= context:
                expected = f"fewer than the model's context of {context}"
                raise InputError("prompt", f"{len(prefix)} tokens", expected, "Shorten it.")
            return row, prefix

        # What does not fit is refused before the weights load, also where the prompts come later.
        for text in args.prompt or ["a prompt"]:
            prepared(text)
        name = settings.values["model_name_or_path"]
        sampler = settings.sampler(name, tokenizer, args.num_samples, args.vllm_server_base_url)
    gap = ""
    for number, text in enumerate(_prompts(args.prompt)):
        with console.stdout_to_stderr():
            row, prefix = prepared(text)
            seed = secrets.randbits(31) if args.seed is None else args.seed + number
            request = Request(prefix, args.num_samples, settings.decoding.max_completion_length, True, seed)
            answers = _answers(row, request, sampler, tokenizer)
        # An empty line between answers, none in front of the first.
        for answer, remark in answers:
            print(gap + answer)
            gap = "\n"
            if remark:
                print(remark)
        # Whoever reads a pipe line by line gets an answer before the next prompt is run.
        sys.stdout.flush()
    return 0


def _prompts(arguments: list[str]) -> Iterator[str]:
    """Yield the prompts of the call, else lines of stdin: on a terminal it asks for them, until an empty one or the
    end."""
    if arguments:
        yield from arguments
        return
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin if line.strip())
        return
    console.log("Enter a prompt; an empty line ends.")
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


def _answers(
    row: Row, request: "Request", sampler: "Sampler", tokenizer: "PreTrainedTokenizerBase"
) -> list[tuple[str, str]]:
    """Return each answer, and a remark on it: its length where there are several, or that it was cut off."""
    from trl_drgrpo.evaluation.running import completed

    answers = []
    (continuations,) = sampler([request])
    for continuation in continuations:
        remark = ""
        if continuation.end == "length":
            remark = f"[cut off at {request.limit} tokens]"
        elif request.count > 1:
            remark = f"[{len(continuation.token_ids)} tokens]"
        answer = completed(row, continuation, tokenizer)["completion"]
        answers.append((completion_text(answer), remark))
    return answers
