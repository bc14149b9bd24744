"""Prints a plan for `trl-drgrpo plan`: a table of components, a recipe fragment, or JSON."""

from typing import Any

import yaml

from trl_drgrpo.single_gpu.memory.proposal import Proposal
from trl_drgrpo.single_gpu.memory.sizes import readable


def table(name: str, memory: int, proposal: Proposal) -> str:
    """Components down, phases across; the phase that decides is marked. `memory`: bytes of the device."""
    estimate = proposal.estimate
    rows = list(dict.fromkeys(part for phase in estimate.phases for part in phase.parts))
    heads = [f"{phase.name}{'*' if phase is estimate.peak else ''}" for phase in estimate.phases]
    lines = [
        f"{name}: {estimate.parameters / 1e9:.2f} billion parameters, {estimate.trained / 1e6:.1f} million trained"
    ]
    lines.append(f"{'':24}" + "".join(f"{head:>12}" for head in heads))
    for part in rows:
        cells = (readable(phase.parts[part]) if part in phase.parts else "-" for phase in estimate.phases)
        lines.append(f"{part:24}" + "".join(f"{cell:>12}" for cell in cells))
    lines.append(f"{'total':24}" + "".join(f"{readable(phase.total):>12}" for phase in estimate.phases))
    return "\n".join([*lines, verdict(memory, proposal)])


def verdict(memory: int, proposal: Proposal) -> str:
    """One sentence: whether it fits, by how much, and what decides."""
    peak = proposal.estimate.peak
    part = peak.largest
    decides = f"Most of it in {peak.name}: {part}, {readable(peak.parts[part])}."
    if proposal.fits:
        return f"Fits {readable(memory)}: the peak is {readable(peak.total)}. {decides}"
    return (
        f"Does not fit {readable(memory)}: the smallest settings tried need {readable(peak.total)}, "
        f"{readable(peak.total - memory)} more. {decides}"
    )


def as_yaml(name: str, memory: int, proposal: Proposal, recipe: dict[str, Any]) -> str:
    """A recipe fragment; comments say what it was planned for. Where nothing fits, it is commented out."""
    setup = proposal.estimate.setup
    text = (
        f"# {name} on {readable(memory)}: planned peak {readable(proposal.estimate.total)}, prompts up to "
        f"{setup.prompt} tokens. An estimate, not a measurement.\n"
    )
    body = yaml.safe_dump(recipe, sort_keys=False)
    if proposal.fits:
        return text + body
    commented = "".join(f"# {line}\n" for line in body.splitlines())
    return f"{text}# Nothing fits. The smallest settings tried:\n{commented}"


def as_json(name: str, memory: int, proposal: Proposal, recipe: dict[str, Any]) -> dict[str, Any]:
    """Everything, bytes as whole numbers."""
    estimate = proposal.estimate
    return {
        "model": name,
        "memory": memory,
        "fits": proposal.fits,
        "peak": estimate.total,
        "peak_phase": estimate.peak.name,
        "parameters": estimate.parameters,
        "trained_parameters": estimate.trained,
        "prompt_tokens": estimate.setup.prompt,
        "phases": {phase.name: {**phase.parts, "total": phase.total} for phase in estimate.phases},
        "recipe": recipe,
    }
