"""`trl-drgrpo env`: versions, devices and optional programs, to paste into an issue. No path and no user's name.

Exit code: 0.
"""

import argparse
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_PACKAGES = (
    *("trl", "transformers", "torch", "accelerate", "datasets", "tokenizers", "peft", "huggingface-hub", "numpy"),
    *("bitsandbytes", "vllm", "liger-kernel", "deepspeed", "flash-attn", "kernels"),
    *("math-verify", "reasoning-gym", "matplotlib", "trackio", "wandb"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options to a parser."""
    parser.description = (
        "Print versions of Python, of the platform and of all packages that a run may depend on, the devices, and "
        "optional programs. Nothing of it names a path, a user or a machine: paste it into an issue."
    )


def run(args: argparse.Namespace) -> int:
    """Collect and print."""
    for name, value in facts().items():
        print(f"- {name}: {value}")
    return 0


def facts() -> dict[str, str]:
    """The printed facts, by name."""
    from trl_drgrpo.common.version import __version__
    from trl_drgrpo.upstream.versions import TRL_SUPPORTED, commit

    hash_ = commit()
    found = {
        "Platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "trl-drgrpo": __version__ + (f" (commit {hash_})" if hash_ else ""),
    }
    for package in _PACKAGES:
        found[package] = _version(package)
    found["trl supported"] = f">={TRL_SUPPORTED[0]},<{TRL_SUPPORTED[1]}"
    found |= _devices()
    found["bubblewrap: the sandbox of code_reward"] = "found" if shutil.which("bwrap") else "not found"
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _devices() -> dict[str, str]:
    """Accelerators as PyTorch sees them."""
    try:
        import torch
    except (ImportError, OSError) as error:  # a library that does not load; its message may hold a path
        return {"Devices": f"torch does not import ({type(error).__name__})"}
    backend: Any = torch.version
    built = next((f"{name} {number}" for name in ("cuda", "hip") if (number := getattr(backend, name, None))), "CPU")
    found = {"torch built for": built}
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        found["Devices"] = ", ".join(f"{each.name} ({each.total_memory / 2**30:.0f} GiB)" for each in devices)
        found["bfloat16"] = "yes" if torch.cuda.is_bf16_supported() else "no"
    elif torch.backends.mps.is_available():
        found["Devices"] = "Apple GPU (mps)"
    else:
        found["Devices"] = f"CPU alone, {torch.get_num_threads()} threads"
    return found
