"""What people wrap around a state_dict, taken off: averages are preferred to the weights they average.

    authors, improved-diffusion, LSUN   the state_dict itself
    Analytic-DPM                        {"models_states": {name: state_dict}}, or "ema_models_states"
    DDIM repository                     [state_dict, optimizer, epoch, step, averages by name]
    score_sde                           {"model": state_dict, "ema": {"shadow_params": [...]}, ...}

`module.` in front of every key is DataParallel's and is taken off too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from optcov.checkpoints.errors import CheckpointError

PREFIX = "module."
MODEL_STATES = ("ema_models_states", "models_states")  # by preference
SHADOWS = "shadow_params"

State = dict[str, Tensor]


def unwrap(content: Any, constants: Collection[str] = (), heads: Collection[str] = ()) -> State:
    """The state_dict in a file's content.

    constants: keys that are no parameters, so that a list of averaged parameters has no entry for them.
    heads: keys that alone are averaged where the rest of the network was frozen.
    """
    if isinstance(content, list):
        return _from_list(content, constants, heads)
    if not isinstance(content, dict):
        raise CheckpointError(f"it holds a {type(content).__name__}, not the weights of a network")
    for name in MODEL_STATES:
        if content.get(name):
            return _state(_only_state(content[name], name))
    if isinstance(content.get("model"), dict):
        return _with_averages(_state(content["model"]), content.get("ema"), constants, heads)
    return _state(content)


def _state(content: Any) -> State:
    """Check that this is a state_dict, and take DataParallel's prefix off."""
    entries = content if isinstance(content, dict) else {}
    if not entries or not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in entries.items()):
        found = ", ".join(str(key)[:40] for key in list(entries)[:8]) or "nothing"
        raise CheckpointError(f"it holds no state_dict that is known here; at its top there is: {found}")
    while all(key.startswith(PREFIX) for key in entries):
        entries = {key.removeprefix(PREFIX): value for key, value in entries.items()}
    return dict(entries)


def _from_list(content: list[Any], constants: Collection[str], heads: Collection[str]) -> State:
    if not content or not isinstance(content[0], dict):
        raise CheckpointError("it holds a list that does not begin with a state_dict")
    averages = content[4] if len(content) > 4 else None
    return _with_averages(_state(content[0]), averages, constants, heads)


def _only_state(states: Any, name: str) -> Any:
    choices = list(states.values()) if isinstance(states, dict) else states
    if not isinstance(choices, list):
        raise CheckpointError(f"{name} holds a {type(states).__name__}, not the weights of a network")
    if len(choices) != 1:
        known = ", ".join(str(key)[:40] for key in list(states)[:8]) if isinstance(states, dict) else len(choices)
        raise CheckpointError(f"{name} holds more than one network ({known}); save the one you want as a file")
    return choices[0]


def _with_averages(model: State, averages: Any, constants: Collection[str], heads: Collection[str]) -> State:
    """Replace parameters by their averages, given by name or as a list in the order of the parameters."""
    if averages is None or averages in ({}, []):
        return model
    if isinstance(averages, dict) and SHADOWS not in averages:
        return _merged(model, _state(averages))
    shadows = averages[SHADOWS] if isinstance(averages, dict) else averages
    if not isinstance(shadows, list) or not all(isinstance(shadow, Tensor) for shadow in shadows):
        raise CheckpointError("its averaged parameters are neither tensors by name nor a list of tensors")
    names = [key for key in model if key not in constants]
    if len(shadows) != len(names):  # only what is trained is averaged
        trained = [key for key in names if key in heads]
        if len(shadows) != len(trained):
            raise CheckpointError(f"it holds {len(shadows)} averaged parameters for {len(names)} parameters")
        names = trained
    return _merged(model, dict(zip(names, shadows, strict=True)))


def _merged(model: State, averages: State) -> State:
    for key, average in averages.items():
        if key not in model or average.shape != model[key].shape:
            there = tuple(model[key].shape) if key in model else "missing"
            raise CheckpointError(f"the average of {key[:200]} has shape {tuple(average.shape)}, in the model {there}")
    return model | averages
