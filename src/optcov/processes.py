"""The processes that share the work of a command, as `accelerate launch` or torchrun started them.

Accelerate decides once per process where it runs, at the first question, and the question decides the answer: asked for
a PartialState it looks for GPUs only, and takes each of several processes on CPUs for the only one. So everything here
asks through this module.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState


def this_process() -> PartialState:
    """This process among its peers: its number, how many there are, and its device."""
    from accelerate import PartialState  # heavy

    return PartialState(cpu=_on_cpu())


def accelerator() -> Accelerator:
    """Accelerate's engine for this process, with the precision and accumulation that its environment asks for."""
    from accelerate import Accelerator

    return Accelerator(cpu=_on_cpu())


def leave() -> None:
    """Destroy the process group: left to the end of the interpreter, it may abort this process."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _on_cpu() -> bool:
    """Whether CPUs are asked for, or are all that several processes could share."""
    import torch
    from accelerate.utils import parse_flag_from_env

    if parse_flag_from_env("ACCELERATE_USE_CPU"):
        return True
    devices = torch.accelerator if hasattr(torch, "accelerator") else torch.cuda  # the general name is of torch 2.6
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and not devices.is_available()
