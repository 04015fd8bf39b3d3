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

from optcov.checkpoints.files import CheckpointError

PREFIX = "module."
MODEL_STATES = ("ema_models_states", "models_states")  # by preference
SHADOWS = "shadow_params"


def unwrap(content: Any, constants: Collection[str] = ()) -> dict[str, Tensor]:
    """The state_dict in a file's content.

    constants: keys that are no parameters, so that a list of averaged parameters has no entry for them.
    """
    if isinstance(content, list):
        return _from_list(content)
    if not isinstance(content, dict):
        raise CheckpointError(f"it holds a {type(content).__name__}, not the weights of a network")
    for name in MODEL_STATES:
        if name in content:
            return unwrap(_only_state(content[name], name), constants)
    if isinstance(content.get("model"), dict):
        return _with_averages(_state(content["model"]), content.get("ema"), constants)
    return _state(content)


def _state(content: dict[Any, Any]) -> dict[str, Tensor]:
    """Check that this is a state_dict, and take DataParallel's prefix off."""
    others = [str(key) for key, value in content.items() if not (isinstance(key, str) and isinstance(value, Tensor))]
    if others or not content:
        found = ", ".join(str(key)[:40] for key in list(content)[:8]) or "nothing"
        raise CheckpointError(f"it holds no state_dict that is known here; at its top there is: {found}")
    prefixed = all(key.startswith(PREFIX) for key in content)
    return {key.removeprefix(PREFIX) if prefixed else key: value for key, value in content.items()}


def _from_list(content: list[Any]) -> dict[str, Tensor]:
    if not content or not isinstance(content[0], dict):
        raise CheckpointError("it holds a list that does not begin with a state_dict")
    averages = content[4] if len(content) > 4 else None
    return _with_averages(_state(content[0]), averages, ())


def _only_state(states: Any, name: str) -> Any:
    choices = list(states.values()) if isinstance(states, dict) else states
    if not isinstance(choices, list) or len(choices) != 1:
        known = ", ".join(map(str, states)) if isinstance(states, dict) else f"{len(choices)} entries"
        raise CheckpointError(
            f"{name} holds more than one network ({known}); save the one you want as a file of its own"
        )
    return choices[0]


def _with_averages(model: dict[str, Tensor], averages: Any, constants: Collection[str]) -> dict[str, Tensor]:
    """Replace parameters by their averages, given by name or as a list in the order of the parameters."""
    if not isinstance(averages, dict) or not averages:
        return model
    if SHADOWS not in averages:
        return _merged(model, _state(averages))
    names = [key for key in model if key not in constants]
    shadows = averages[SHADOWS]
    if not isinstance(shadows, list) or len(shadows) != len(names):
        count = len(shadows) if isinstance(shadows, list) else "no"
        raise CheckpointError(f"it holds {count} averaged parameters for {len(names)} parameters of the model")
    if not all(isinstance(shadow, Tensor) for shadow in shadows):
        raise CheckpointError("its averaged parameters are not all tensors")
    return _merged(model, dict(zip(names, shadows, strict=True)))


def _merged(model: dict[str, Tensor], averages: dict[str, Tensor]) -> dict[str, Tensor]:
    for key, average in averages.items():
        if key not in model or average.shape != model[key].shape:
            there = tuple(model[key].shape) if key in model else "missing"
            raise CheckpointError(
                f"the average of {key} has shape {tuple(average.shape)}, but in the model it is {there}"
            )
    return model | averages
