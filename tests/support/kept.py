"""What a process that trains many times need not do each time, and such a process that forks a run per request."""

import functools
import gc
import importlib.metadata
import os
import sys
import traceback


def imports_are_not_collected():
    """Every run of transformers' trainer collects garbage twice: 0.15 s each over what is imported for good."""
    gc.collect()
    gc.freeze()


def metadata_is_read_once():
    """Each step of accelerate and each model card asks for versions of packages, which Python reads anew each time."""
    found = importlib.metadata.Distribution
    found.from_name = functools.cache(found.from_name)
    found.metadata = property(functools.cache(found.metadata.fget))


def answer(handle):
    """Answers each line of standard input with what `handle` makes of it; whatever else is printed is no answer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    imports_are_not_collected()
    metadata_is_read_once()
    for line in sys.stdin:
        answers.write(f"{handle(line)}\n")
        answers.flush()


def forked(log, run):
    """The id of a process that runs this and ends, with 0 if that went well; what it prints goes into a file."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with open(log, "a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
