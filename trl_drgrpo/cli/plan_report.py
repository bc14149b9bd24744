"""Prints a plan for `trl-drgrpo plan`: a table of components, a recipe fragment, or JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from trl_drgrpo.single_gpu.memory.amounts import Card, readable
from trl_drgrpo.single_gpu.memory.proposal import Proposal

Phases = Mapping[str, Mapping[str, int]]  # bytes, by phase and part


@dataclass(frozen=True)
class PlanReport:
    """A plan with what it was made for.

    Args:
        name (`str`): The model.
        card ([`Card`], *optional*): The device, where it was named.
        memory, margin (`int`): Bytes of the device, and how many of them stay free.
        proposal ([`Proposal`]): The settings.
        host (`dict[str, dict[str, int]]`): Bytes of the host's memory, by phase and part.
        recipe (`dict[str, Any]`): The settings with the given ones, as recipe keys.
    """

    name: str
    card: Card | None
    memory: int
    margin: int
    proposal: Proposal
    host: Phases
    recipe: dict[str, Any]

    @property
    def room(self) -> str:
        """The device in words."""
        amount = f"{readable(self.memory)} less a margin of {readable(self.margin)}"
        return amount if self.card is None else f"{self.card.name}, {amount}"

    def table(self) -> str:
        """Components down, phases across, of the device and of the host; the phase that decides is marked."""
        estimate = self.proposal.estimate
        counts = f"{estimate.parameters / 1e9:.2f} billion parameters, {estimate.trained / 1e6:.1f} million trained"
        device = {f"{phase.name}{'*' if phase is estimate.peak else ''}": phase.parts for phase in estimate.phases}
        lines = [*_lines("on the device", device), *(_lines("on the host", self.host) if self.host else ())]
        return "\n".join([f"{self.name}: {counts}", *lines, self.verdict()])

    def verdict(self) -> str:
        """Whether it fits, by how much, and what decides."""
        peak = self.proposal.estimate.peak
        decides = f"Most of it in {peak.name}: {peak.largest}, {readable(peak.parts[peak.largest])}."
        if self.proposal.fits:
            return f"Fits {self.room}: the peak is {readable(peak.total)}. {decides}"
        least, more = readable(peak.total), readable(peak.total - (self.memory - self.margin))
        return f"Does not fit {self.room}: the smallest settings tried need {least}, {more} more. {decides}"

    def as_yaml(self) -> str:
        """A recipe fragment; comments say what it was planned for. Where nothing fits, it is commented out."""
        estimate = self.proposal.estimate
        text = (
            f"# {self.name} on {self.room}: planned peak {readable(estimate.total)}, prompts up to "
            f"{estimate.setup.prompt} tokens. An estimate, not a measurement.\n"
        )
        body = yaml.safe_dump(self.recipe, sort_keys=False)
        if self.proposal.fits:
            return text + body
        commented = "".join(f"# {line}\n" for line in body.splitlines())
        return f"{text}# Nothing fits. The smallest settings tried:\n{commented}"

    def as_json(self) -> dict[str, Any]:
        """Everything, bytes as whole numbers."""
        estimate = self.proposal.estimate
        return {
            "model": self.name,
            "device": None if self.card is None else self.card.name,
            "memory": self.memory,
            "margin": self.margin,
            "fits": self.proposal.fits,
            "peak": estimate.total,
            "peak_phase": estimate.peak.name,
            "parameters": estimate.parameters,
            "trained_parameters": estimate.trained,
            "prompt_tokens": estimate.setup.prompt,
            "phases": _with_totals({phase.name: phase.parts for phase in estimate.phases}),
            "host": _with_totals(self.host),
            "recipe": self.recipe,
        }


def _with_totals(phases: Phases) -> dict[str, dict[str, int]]:
    return {name: {**parts, "total": sum(parts.values())} for name, parts in phases.items()}


def _lines(title: str, phases: Phases) -> list[str]:
    parts = dict.fromkeys(part for phase in phases.values() for part in phase)
    lines = [f"{title:32}" + "".join(f"{name:>11}" for name in phases)]
    for part in parts:
        cells = (readable(phase[part]) if part in phase else "-" for phase in phases.values())
        lines.append(f"{part:32}" + "".join(f"{cell:>11}" for cell in cells))
    return [*lines, f"{'total':32}" + "".join(f"{readable(sum(p.values())):>11}" for p in phases.values())]
