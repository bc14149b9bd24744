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
from typing import Any

from trl_drgrpo.cli import console
from trl_drgrpo.cli.data import as_prompted, check_slots
from trl_drgrpo.cli.run_keys import ANSWER_KEYS, add_keys, read_given, was_trained_on_messages
from trl_drgrpo.common.errors import InputError
from trl_drgrpo.common.ranges import RANGES, refuse_outside, whole
from trl_drgrpo.evaluation import models
from trl_drgrpo.process_rewards.texts import prompt_ids
from trl_drgrpo.rewards.texts import completion_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options to a parser."""
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="one prompt per argument")
    add_keys(parser, ANSWER_KEYS)
    add = parser.add_argument
    add("--num_samples", type=int, default=1, help="answers per prompt (default: 1)")
    add("--seed", type=int, help="sampling seed (default: random)")
    server = "answer with a vLLM server that serves this model, or the base of this adapter"
    add("--vllm_server_base_url", metavar="URL", help=server)
    add("--chat", action=argparse.BooleanOptionalAction, help="prompt as a user's message (default: as in the run)")


def run(args: argparse.Namespace) -> int:
    """Load and answer."""
    refuse_outside("num_samples", args.num_samples, whole(1, remedy="Give a positive number."))
    if args.seed is not None:
        refuse_outside("seed", args.seed, RANGES["seed"])
    given = read_given(args)
    from trl_drgrpo.process_rewards.sampling import Request
    from trl_drgrpo.single_gpu.vocabulary import context_length

    prompts = _prompts(args.prompt)
    with console.stdout_to_stderr():
        tokenizer = models.load_tokenizer(given.model, given.loading)
        chat = args.chat
        if chat is None and given.values.get("prompt_template") is None:  # as in the run
            chat = was_trained_on_messages(given.model)
            chat = getattr(tokenizer, "chat_template", None) is not None if chat is None else chat
        context = context_length(models.load_config(given.model, given.loading))

        def asked(text: str) -> tuple[dict[str, Any], tuple[int, ...]]:
            """A prompt as a row of the dataset that the run would have made of it, and its tokens."""
            row: dict[str, Any] = {"prompt": text}
            check_slots(row, given.prompting["prompt_template"])
            row |= as_prompted(row, **given.prompting)
            if chat and isinstance(row["prompt"], str):
                row["prompt"] = [{"role": "user", "content": row["prompt"]}]
            prefix = tuple(prompt_ids(row["prompt"], tokenizer, given.template))
            if context is not None and len(prefix) >= context:
                expected = f"fewer than the model's context of {context}"
                raise InputError("prompt", f"{len(prefix)} tokens", expected, "Shorten it.")
            return row, prefix

        for text in args.prompt or ["a prompt"]:  # whatever does not fit, before the weights load
            asked(text)
        name, url = given.values["model_name_or_path"], args.vllm_server_base_url
        sampler = given.sampler(name, tokenizer, args.num_samples, url)
    began = False
    for number, text in enumerate(prompts):
        with console.stdout_to_stderr():
            row, prefix = asked(text)
            seed = secrets.randbits(31) if args.seed is None else args.seed + number
            request = Request(prefix, args.num_samples, given.decoding.max_completion_length, True, seed)
            answers = _answers(row, request, sampler, tokenizer)
        for answer, said in answers:
            print("\n" * began + answer)  # an empty line in between
            began = True
            if said:
                print(said)
        sys.stdout.flush()
    return 0


def _prompts(given: list[str]) -> Iterator[str]:
    """Those of the call, else lines of stdin: asked for on a terminal, until an empty one or the end."""
    if given:
        yield from given
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


def _answers(row: dict[str, Any], request: Any, sampler: Any, tokenizer: Any) -> list[tuple[str, str]]:
    """Each answer, and a remark on it: its length where there are several, or that it was cut off."""
    from trl_drgrpo.evaluation.running import completed

    said = []
    for each in sampler([request])[0]:
        remark = f"[{len(each.token_ids)} tokens]" if request.count > 1 else ""
        if each.end == "length":
            remark = f"[cut off at {request.limit} tokens]"
        said.append((completion_text(completed(row, each, tokenizer)["completion"]), remark))
    return said
