"""The side of the tests: runs them, asks the completion's process for values, and decides. It runs inside, alone.

The tests run in this process, where no line of the completion ever does. Names of the completion (see `names.py`)
stand for objects of its process; calling one sends the arguments there and gets plain data back. So what
is compared with what, and the expected values, are out of the completion's sight and reach.
"""

import ast
import os
import sys
import types

from trl_drgrpo.rewards.functions.code import checks, entries, names, wire
from trl_drgrpo.rewards.functions.code.remote import Channel, Solution, Undecided, Unsupported


def examine():
    """Read one job from standard input, write what became of it, a line each, to standard output."""
    reader, writer = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    job = wire.receive(reader)
    try:
        tally = checks.Tally()
        prepared = prepare(job["tests"], job["setup"], job["entry_point"], tally)
    except BaseException as error:
        wire.send(writer, {"broken": f"{type(error).__name__}: {error}"})
        return
    namespace, tests, _ = prepared
    wire.send(writer, {"tests": len(tests)})
    shared = compile(job["setup"], "<setup>", "exec").co_names
    channel = Channel(os.fdopen(job["read_fd"], "rb"), os.fdopen(job["write_fd"], "wb"), namespace, shared)
    try:
        for verdict in verdicts(channel, job, prepared, tally):
            wire.send(writer, verdict)
    except Unsupported as error:
        wire.send(writer, {"undecided" if isinstance(error, Undecided) else "broken": str(error)})
    except EOFError:
        wire.send(writer, {"gone": True})


def verdicts(channel, job, prepared, tally):
    """Yield `{"loaded": bool}` and then `{"passed": bool}` per test, from the job's `first` on."""
    namespace, tests, asked = prepared
    sys.modules["solution"] = Solution(channel)
    try:
        channel.ask({"do": "load", "source": job["setup"] + "\n" + job["code"]})
        for name in asked:
            try:
                namespace[name] = channel.look_up(name)
            except NameError:  # missed when a test uses it
                namespace.pop(name, None)
    except Exception as error:
        if isinstance(error, EOFError) and channel.is_gone:
            raise
        yield {"loaded": False}
        return
    yield {"loaded": True}
    for index, (preparation, test) in enumerate(tests):
        tally.start()
        passed = run(preparation, namespace)
        if index >= job["first"]:
            passed = run(test, namespace) and passed
        if channel.is_gone:
            raise EOFError
        if index >= job["first"]:
            passed = passed and has_checked(tally, channel)
            yield {"passed": passed}
            if job["stop_at_first"] and not passed:
                return


def has_checked(tally, channel):
    """Whether a test that ran to its end says anything; one that checks nothing of what it asked for has failed."""
    if not tally.checks and not channel.uses:
        raise Unsupported("a test that checks nothing and never uses the completion")
    return tally.checks > 0 and not tally.has_failed


def run(code, namespace):
    """Whether it ran without an exception; whatever it raises is put down to the completion."""
    try:
        exec(code, namespace)
    except Exception:
        return False
    except (SystemExit, KeyboardInterrupt, GeneratorExit):
        return False
    return True


def prepare(tests, setup, entry_point, tally=None):
    """Everything that needs no completion: the namespace of the tests; per test the code that leads to it and the code
    that is it; the names to ask the completion for."""
    module = sys.modules["tests"] = types.ModuleType("tests")
    namespace = module.__dict__
    namespace.update((tally or checks.Tally()).names())
    setup = checks.counted(setup)
    exec(compile(setup, "<setup>", "exec"), namespace)
    trees = [checks.counted(text) for text in ([tests] if isinstance(tests, str) else tests)]
    split = entries.split_tests(trees, setup, entry_point, is_text=isinstance(tests, str))
    codes = [(_compiled(before), _compiled(test)) for before, test in split]
    return namespace, codes, names.names_to_ask(split, namespace, entry_point, setup)


def _compiled(nodes):
    return compile(ast.Module(body=list(nodes), type_ignores=[]), "<tests>", "exec")
