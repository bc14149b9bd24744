"""Series of optimizer steps on their way through the run warnings."""

import statistics

from trl_drgrpo.features.diagnostics.run_warnings import RunWarnings, warning_thresholds

G = 8
ONLY_LOGGED = ("grad_norm", "learning_rate", "drgrpo/moved_frac")


class Told:
    """Runs series of optimizer steps through the warnings, as the trainer does, and keeps what was told."""

    def __init__(self, setting=True, logging_steps=1):
        self.warnings = []
        self.logging_steps = logging_steps
        self.watched = RunWarnings(warning_thresholds(setting), G, lambda *what: self.warnings.append(what))

    def feed(self, after=0, **series):
        names = {name.replace("__", "/"): values for name, values in series.items()}
        logged = {}  # name -> values since the last log
        for step in range(max(len(values) for values in names.values())):
            metrics = {name: values[step] for name, values in names.items()}
            only_logged = {name: metrics.pop(name) for name in ONLY_LOGGED if name in metrics}
            self.watched.observe(after + step + 1, metrics)
            for name, value in metrics.items():
                logged.setdefault(name, []).append(value or 0.0)
            if (after + step + 1) % self.logging_steps == 0:
                means = {name: statistics.fmean(values) for name, values in logged.items()}
                self.watched.observe_log(after + step + 1, means | only_logged)
                logged = {}
        return self

    def finish(self):
        self.watched.finish()
        return self

    @property
    def causes(self):
        return [cause for _, cause, _ in self.warnings]

    @property
    def text(self):
        return " ".join(message for _, _, message in self.warnings)
