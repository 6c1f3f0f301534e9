"""Sees every tensor that torch makes room for."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NewTensors(TorchDispatchMode):
    """Inside, `made` is called with the storage of each result that is no view and was not changed in place."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in known:
                    self.made(storage)
        return result

    def made(self, storage: torch.UntypedStorage) -> None:
        raise NotImplementedError
