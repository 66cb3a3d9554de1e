"""Modules that initialise and shard themselves as their Config says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.tensor import distribute_tensor
from torchtitan.config import Configurable


@dataclass(kw_only=True)
class ShardingConfig:
    """Parameter name -> placement on the mesh dimension "ep"."""

    state_shardings: dict = field(default_factory=dict)


class Module(nn.Module, Configurable):
    _param_init: dict[str, Callable] | None = None
    _sharding_config: ShardingConfig | None = None

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        param_init: dict | None = None
        sharding_config: ShardingConfig | None = None

        def build(self):
            module = Configurable.Config.build(self)
            module._param_init = self.param_init
            module._sharding_config = self.sharding_config
            return module

    def init_states(self):
        for child in self.children():
            child.init_states()
        for name, parameter in self.named_parameters(recurse=False):
            self._init_param(name, parameter)

    def _init_param(self, name, param):
        self._param_init[name](param)

    def parallelize(self, parallel_dims):
        for child in self.children():
            child.parallelize(parallel_dims)
        mesh = parallel_dims.get_optional_mesh("ep")
        if self._sharding_config is None or mesh is None:
            return
        for name, parameter in list(self.named_parameters(recurse=False)):
            placement = self._sharding_config.state_shardings[name]
            sharded = distribute_tensor(parameter, mesh, [placement])
            self.register_parameter(name, nn.Parameter(sharded))
