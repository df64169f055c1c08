"""Helpers of transforms for the rows of tensordicts of any batch size, whose values may differ in length."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.data import Composite, TensorSpec
from torchrl.envs import Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv

from skyrl_train.tensordict import ragged


def chat_setting(transform: Transform, name: str, default: Any) -> Any:
    """Return an attribute of the ChatEnv under a transform; `default` if it is None or there is no ChatEnv.

    Environments that combine several (SerialEnv, ParallelEnv) count as none.
    """
    try:
        environment = transform.container
    except ValueError:  # it is in a composition that has no environment
        return default
    while isinstance(environment, TransformedEnv):
        environment = environment.base_env
    found = getattr(environment, name) if isinstance(environment, ChatEnv) else None
    return default if found is None else found


def rows_of(tensordict: TensorDictBase) -> list[TensorDictBase]:
    """Return shallow copies of the rows of a tensordict of any batch size, in row-major order."""
    return [row.copy() for row in ragged.rows_of(tensordict)]


def reset_rows(tensordict: TensorDictBase | None, size: int) -> list[bool]:
    """Return which of `size` rows a reset begins: those of its mask "_reset", or all without a mask."""
    mask = None if tensordict is None else tensordict.get("_reset", None)
    return [True] * size if mask is None else mask.reshape(size, -1).any(-1).tolist()


def add_spec(specs: Composite, key: NestedKey, spec: TensorSpec, kind: type) -> None:
    """Add the spec of a key; if it is (container, field), that of the container as an object of class `kind`."""
    if isinstance(key, str) or key[0] in specs.keys():  # noqa: SIM118 - a spec
        specs[key] = spec
    else:
        fields = {key[1]: spec}
        specs[key[0]] = Composite(fields, shape=specs.shape, device=specs.device, data_cls=kind, step_mdp_static=True)
