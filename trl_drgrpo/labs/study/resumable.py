"""A study with arms and seeds that can be interrupted: rows in one file; rows that are there are not run again."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from trl_drgrpo.labs.provenance import provenance, study_command
from trl_drgrpo.labs.study.results_file import earlier_results, write_results

Row = dict[str, Any]


class Resumable:
    """A study and its file. Parts that an earlier call with the same settings and versions has left there are kept.

    Args:
        name (`str`): Of the study.
        seeds (`Sequence[int]`): Seeds.
        settings (`dict[str, Any]`): All settings that the numbers depend on.
        output (`Path`): JSON file, written after each part.
        jobs (`int`, *optional*, defaults to `1`): Parts at a time.
        on_part (`Callable`, *optional*): Called with a line of text after each part.

    Attributes:
        results (`dict[str, Any]`): `command`, `date`, `versions`, `settings` and the parts, as in the file.
    """

    def __init__(
        self,
        name: str,
        seeds: Sequence[int],
        settings: dict[str, Any],
        output: Path,
        jobs: int = 1,
        on_part: Callable[[str], None] = lambda text: None,
    ):
        self.output, self.jobs, self.on_part = output, jobs, on_part
        self.results = {**provenance(study_command(name, len(seeds), jobs)), "settings": settings}
        self._earlier = earlier_results(output, self.results)

    def once(self, name: str, make: Callable[[], Any]) -> None:
        """A part without arms: made unless it is there.

        Args:
            name (`str`): In the results.
            make (`Callable`): Makes it.
        """
        self.results[name] = self._earlier.get(name)
        if self.results[name] is None:
            self.results[name] = make()
            self._keep(name)

    def each(
        self,
        name: str,
        keys: Sequence[str],
        calls: Sequence[tuple[Any, ...]],
        run: Callable[..., list[Row]],
        told: Callable[[Row], str],
        chosen: Callable[..., bool] = lambda *call: True,
    ) -> list[Row]:
        """The rows of a part, in the order of the calls; those that are missing are run.

        Args:
            name (`str`): In the results.
            keys (`Sequence[str]`): Keys of a row that name the call that made it.
            calls (`Sequence[tuple]`): All calls of the part.
            run (`Callable`): `f(*call)` -> rows; with several jobs in a process of its own, so it has to be picklable.
            told (`Callable`): From the first row of a call to the line for `on_part`.
            chosen (`Callable`, *optional*): Whether a call is due now; by default each is.
        """
        rows = self.results.setdefault(name, self._earlier.get(name, []))
        place = {call: at for at, call in enumerate(calls)}

        def made_by(row: Row) -> tuple[Any, ...]:
            return tuple(row[key] for key in keys)

        done = {made_by(row) for row in rows}
        left = [call for call in calls if call not in done and chosen(*call)]
        for made in in_processes(run, left, self.jobs):
            rows.extend(made)
            rows.sort(key=lambda row: place.get(made_by(row), len(place)))
            self._keep(told(made[0]))
        return rows

    def _keep(self, text: str) -> None:
        write_results(self.results, self.output)
        self.on_part(text)


def in_processes(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], jobs: int) -> Iterator[Any]:
    """Results of a function for several calls, as the calls end.

    Args:
        function (`Callable`), calls (`Sequence[tuple]`): The function, and the arguments of each call.
        jobs (`int`): Calls at a time, in processes of their own with a thread each if more than one.
    """
    if jobs == 1:
        yield from (function(*call) for call in calls)
        return
    import torch

    with ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        for future in as_completed([pool.submit(function, *call) for call in calls]):
            yield future.result()
