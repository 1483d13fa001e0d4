"""MachineFace: what modules and callbacks ask a trainer about devices, processes, strategy and precision."""

from __future__ import annotations

from typing import Any


class MachineFace:
    """Trainer's attributes that say where it runs, answered by the loop's Fabric."""

    fabric: Any
    _strategy_face: Any

    @property
    def strategy(self) -> Any:
        """Fabric's strategy, with the few words more that callbacks use."""
        return self._strategy_face

    @property
    def accelerator(self) -> Any:
        """The accelerator, as Trainer has it: it can ``get_device_stats``."""
        from lightning.pytorch import accelerators

        own = self.fabric.accelerator  # Fabric's; Trainer's has the same name
        twin = getattr(accelerators, type(own).__name__, None)
        return own if twin is None else twin()

    @property
    def precision(self) -> str:
        """Such as "32-true" or "bf16-mixed"."""
        return self.fabric.strategy.precision.precision

    @property
    def precision_plugin(self) -> Any:
        """The strategy's precision, with ``clip_gradients``."""
        return self._strategy_face.precision_plugin

    @property
    def scaler(self) -> Any:
        """The gradient scaler under 16-mixed."""
        return getattr(self.fabric.strategy.precision, "scaler", None)

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the process that writes."""
        return self.fabric.is_global_zero

    @property
    def global_rank(self) -> int:
        """This process's number among all."""
        return self.fabric.global_rank

    @property
    def local_rank(self) -> int:
        """This process's number on its machine."""
        return self.fabric.local_rank

    @property
    def node_rank(self) -> int:
        """This machine's number."""
        return self.fabric.node_rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.fabric.world_size

    @property
    def num_devices(self) -> int:
        """Devices on this machine."""
        return len(getattr(self.fabric.strategy, "parallel_devices", None) or [0])

    @property
    def num_nodes(self) -> int:
        """Machines."""
        return getattr(self.fabric.strategy, "num_nodes", 1)

    @property
    def device_ids(self) -> list[int]:
        """The indices of this machine's devices."""
        devices = getattr(self.fabric.strategy, "parallel_devices", None) or [self.fabric.device]
        return [device.index if device.index is not None else i for i, device in enumerate(devices)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """What a DistributedSampler needs, None for one process."""
        return getattr(self.fabric.strategy, "distributed_sampler_kwargs", None)
