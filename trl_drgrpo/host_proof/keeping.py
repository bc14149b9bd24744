"""When a proof is needed, where its result is kept, and the process that makes it.

The proof trains in a process of its own: this one may hold a GPU, a process group and accelerate's state, which a
second trainer would change. Of several ranks the first proves, and the others get its result.
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from importlib import import_module
from pathlib import Path

import torch

from trl_drgrpo.common.disk import write_whole
from trl_drgrpo.common.errors import InputError, UpstreamError
from trl_drgrpo.config.config import DrGRPOConfig
from trl_drgrpo.features.fast_path.speed import GENERATION, TRAINING, SpeedPart
from trl_drgrpo.host_proof import is_proving
from trl_drgrpo.host_proof.comparison import TOLERANCE
from trl_drgrpo.host_proof.proof import COMPARED, MERGED, HostProof, prove
from trl_drgrpo.upstream.seams import SEAMS, in_words, moved_seams, vanished_texts
from trl_drgrpo.upstream.versions import LIBRARIES, TESTED, commit, installed_versions, untested_versions

logger = logging.getLogger(__name__)

# Seconds. A proof takes 11 of one core, 7 of them to import the libraries. Other ranks wait in a broadcast, which NCCL
# ends after 600.
LONGEST = 300
_PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; from trl_drgrpo.host_proof.keeping import main; main()"
# Variables of launchers, by their beginning. With one of them set, the proof would wait for other processes.
_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "TORCHELASTIC_",
    "ACCELERATE_",
    "FSDP_",
    "DEEPSPEED_",
    "PMI_",
    "OMPI_",
    "MV2_",
)
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # the run may need all of the GPU's memory
    "HF_HUB_OFFLINE": "1",  # everything is built in memory, so no network may delay it
    "OMP_NUM_THREADS": "1",  # so small a model stalls with more threads where cores are shared
    "TOKENIZERS_PARALLELISM": "false",
}

# Source texts that matter under some settings alone. A proof's tiny model trains without, and cannot vouch for them.
_UNDER = {
    "tools": (
        "self._env_tools[name] = tools + methods",
        "self._environment_pool[name] = [instance]",
        "self._sync_tool_dicts.append(sync_tool_dict)",
        "self._async_tool_dicts.append(async_tool_dict)",
        "self.environments.append(pool[index])",
        "= environment.reset(**reset_kwargs)",
        "self._batch_environments",
        *SEAMS["_tool_call_loop"][1:],
    ),
    "rollout_func": SEAMS["_generate"][1:],
    "use_vllm": (
        "self.vllm_generation = VLLMGeneration(",
        *SEAMS["VLLMGeneration._init_vllm"][1:],
        *SEAMS["VLLMGeneration._iter_named_params"][1:],
        *SEAMS["VLLMGeneration.sync_weights"][1:],
    ),
}


def hosts() -> dict[str, str]:
    """Return what a proof holds for: versions, the commit of a checkout of this package, and texts that TRL no longer
    contains."""
    installed = installed_versions((*LIBRARIES, *TESTED))
    # A checkout changes without a new version, and so may what a proof of it has found.
    commit_of_checkout = commit()
    if commit_of_checkout is not None:
        installed["commit"] = commit_of_checkout
    for name, texts in vanished_texts().items():
        installed[f"trl {name}"] = in_words(texts)
    return installed


def file_of(installed: Mapping[str, str]) -> Path:
    """Return the file that keeps the proof of these versions, in the user's cache folder.

    Raises:
        `RuntimeError`: The user has no home folder.
    """
    versions = []
    for package in (*LIBRARIES, "peft"):
        if package in installed:
            versions.append(f"{package}-{installed[package]}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "trl_drgrpo" / "host_proofs" / f"{'_'.join(versions)}.json"


def kept_proof() -> HostProof | None:
    """Return the proof of the installed versions; `None` where there is none that can be read."""
    installed = hosts()
    try:
        file = file_of(installed)
        if not file.is_file():  # reading a pipe would never end
            return None
        content = json.loads(file.read_text(encoding="utf-8"))
        # By name: another version of the package may have written fields that this one does not have.
        proof = HostProof(**{field.name: content[field.name] for field in fields(HostProof)})
        texts = [*proof.parts.values(), *proof.errors.values()]
        numbers = [proof.equal_tokens, proof.seconds]
        numbers += [proof.differences[name] for name in COMPARED]
        # The name of the file leaves out most of `hosts`, and anybody may have edited it.
        is_complete = (
            proof.hosts == installed
            and set(SpeedPart) >= proof.parts.keys() >= {*GENERATION, *TRAINING}
            and all(isinstance(text, str) for text in texts)
            and all(isinstance(number, float) for number in numbers)
        )
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        logger.info("The kept proof of the host libraries cannot be read (%s).", type(error).__name__)
        return None
    if not is_complete:
        return None
    return proof


def keep(proof: HostProof) -> bool:
    """Write a proof to the user's cache folder, whole or not at all; return `False` where the next run proves anew."""
    try:
        write_whole(file_of(proof.hosts), json.dumps(asdict(proof), indent=2))
    except (OSError, RuntimeError, InputError) as error:
        logger.warning(
            "The proof of the host libraries cannot be kept, so every run makes it again. Set XDG_CACHE_HOME to a "
            "folder that can be written to. (%s)",
            error,
        )
        return False
    return True


def require_proof(
    trainer_class: type, args: DrGRPOConfig, vanished: Mapping[str, list[str]], settings: Mapping[str, object]
) -> dict[SpeedPart, str]:
    """Prove the installed libraries unless that is done, and refuse a run on those that compute something else.

    Args:
        trainer_class (`type`): `DrGRPOTrainer`.
        args ([`DrGRPOConfig`]): Of the run.
        vanished (`Mapping[str, list[str]]`): Source texts that TRL no longer contains, see `require_seams`.
        settings (`Mapping[str, Any]`): Of the run: `tools` (or environments, which have some), `rollout_func` and
            `use_vllm`. A run with one of them needs texts that no proof covers.

    Returns:
        `dict`: Parts of the fast path that do not work here, with the reason. Empty inside of a proof, and for a run
            without the fast path.

    Raises:
        `UpstreamError`: A gradient or a merged adapter is wrong; or texts have vanished, and nothing could be proven,
            or no proof covers them.
    """
    if is_proving.get():
        return {}
    needed = set()
    for setting, texts in _UNDER.items():
        if settings[setting]:
            needed.update(texts)
    vanished_in_words = {}
    unproven = {}
    for name, texts in vanished.items():
        vanished_in_words[name] = in_words(texts)
        if needed.intersection(texts):
            unproven[name] = vanished_in_words[name]
    # Before the proof, which takes seconds and could not save this run.
    if unproven:
        raise moved_seams(unproven)
    proof, failure = _on_the_first_rank(trainer_class, args)
    if proof is None:
        # Other versions alone are no reason to refuse a run; with texts that have vanished, only a proof lets it pass.
        if vanished:
            raise moved_seams(vanished_in_words | {"proof on a tiny model": f"could not be made ({failure})"})
        logger.warning("No proof of the host libraries: %s. `trl-drgrpo check` tries it again.", failure)
        return {}
    for name in (args.micro_batching, MERGED):
        if name in proof.wrong:
            raise _refusal(proof, name)
    for name, words in vanished_in_words.items():
        logger.warning("TRL's %s %s. A proof on a tiny model has passed.", name, words)
    if args.micro_batching != "exact":
        return {}
    versions = ", ".join(f"{package} {number}" for package, number in untested_versions().items())
    versions = versions or "this TRL"  # a tested version, in which somebody has changed texts
    return {part: f"a proof on {versions} found that {reason}" for part, reason in proof.off.items()}


def _on_the_first_rank(trainer_class: type, args: DrGRPOConfig) -> tuple[HostProof | None, str]:
    """Return the kept or a new proof, the same one on every rank; or why there is none."""
    result: tuple[HostProof | None, str] = (None, "")
    is_distributed = args.world_size > 1 and torch.distributed.is_initialized()  # the first builds the process group
    if not is_distributed or args.process_index == 0:
        result = (kept_proof(), "")
        if result[0] is None:
            result = prove_apart(trainer_class)
    results = [result]  # `broadcast_object_list` fills the other ranks' lists in place
    if is_distributed:
        torch.distributed.broadcast_object_list(results, src=0)
    return results[0]


def _refusal(proof: HostProof, name: str) -> UpstreamError:
    """Return the error about something that is wrong, with the versions and what to do."""
    versions = ", ".join(f"{package} {proof.hosts[package]}" for package in TESTED if package in proof.hosts)
    pins = []
    for package in untested_versions() or ["trl"]:
        pin = f"{package}=={TESTED[package][-1]}"
        if package == "torch":  # tested by its minor version; a shell would expand the star
            pin = f"'{pin}.*'"
        pins.append(pin)
    remedy = f"Install versions that were tested: pip install {' '.join(pins)}"
    if name == "exact" and "upstream" not in proof.wrong:
        remedy += ", or set micro_batching='upstream', which is right here"
    return UpstreamError(
        f"{versions}: got {proof.wrong[name]}, on a tiny model; expected at most {TOLERANCE:.0e}. {remedy}. "
        "`trl-drgrpo check` proves it again."
    )


def prove_apart(trainer_class: type) -> tuple[HostProof | None, str]:
    """Prove in a process of its own and keep the result; or return why that could not be done."""
    logger.warning("Proving the host libraries on a tiny model, once for these versions: some seconds.")
    name = f"{trainer_class.__module__}:{trainer_class.__qualname__}"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHERS)}
    try:
        # -P: without the current folder in front of `sys.path`, which is handed over as it is here.
        process = subprocess.run(
            [sys.executable, "-P", "-c", _PROGRAM, name, *sys.path],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LONGEST,
            env=environment | _ENVIRONMENT,
        )
        if process.returncode:
            last_line = (process.stderr.splitlines() or [""])[-1]
            raise ChildProcessError(f"it ended with {process.returncode}: {last_line}")
        # The last line: a library may print to the descriptor itself, which `redirect_stdout` does not catch.
        proof = HostProof(**json.loads(process.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError) as error:
        return None, f"{type(error).__name__}: {str(error)[:300]}"
    keep(proof)
    return proof, ""


def main() -> None:
    """Entry point of the process that proves: `python -c "..." <module>:<trainer class>`; prints the proof as JSON."""
    module, _, name = sys.argv[1].partition(":")
    # Libraries print while they train; the proof alone goes to stdout.
    with contextlib.redirect_stdout(sys.stderr):
        proof = prove(getattr(import_module(module), name), hosts())
    sys.stdout.write(json.dumps(asdict(proof)) + "\n")
