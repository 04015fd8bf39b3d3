"""Classes of diffusers with settings of our own beside theirs, whatever settings their release has.

diffusers reads which settings a class has from the signature of its constructor. `extended` gives a subclass the
signature of both.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any


def extended(base: type, ours: Mapping[str, Any], then: Callable[[Any], None]) -> Callable[..., None]:
    """A constructor for a subclass of `base`: its settings and ours with their defaults, all of them in the config.

    then: what is done afterwards, when `self.config` has everything.
    """
    theirs = inspect.signature(inspect.unwrap(base.__init__))  # type: ignore[misc]
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        *theirs.parameters.values(),
        *(inspect.Parameter(name, keyword, default=value) for name, value in ours.items()),
    ]

    @functools.wraps(base.__init__)  # type: ignore[misc]
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        own = {name: kwargs.pop(name, default) for name, default in ours.items()}
        base.__init__(self, *args, **kwargs)  # type: ignore[misc]
        self.register_to_config(**own)
        then(self)

    init.__signature__ = theirs.replace(parameters=parameters)  # type: ignore[attr-defined]
    return init
