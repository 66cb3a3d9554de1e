"""Expert-parallel groups: the ranks that share the experts of a layer, and the memory they map."""

from __future__ import annotations

import platform
import uuid
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .support import supports

# Where a group finds max_tokens itself, it rounds up to a multiple of this: one block of rows.
TOKEN_GRANULARITY = 128

_groups: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()


class Group:
    """The ranks of one expert-parallel group that this process runs; made by `ep_group` and
    `virtual_ep_group`. The memory it maps is released when the last reference to it is gone.

    Attributes:
        id: the number that ops take.
        ep_size: ranks in the group, over all processes.
        ranks: those that a call with this group runs: one, or all of a virtual group.
        device: where tensors must be.
        max_tokens: the most tokens a rank may bring to a call; None until it is known.
        deadline_s: the longest wait for another rank, in seconds; 0 is 300.
    """

    def __init__(
        self,
        id: int,
        ep_size: int,
        ranks: Sequence[int],
        device: torch.device,
        max_tokens: int | None,
        deadline_s: float = 0.0,
        has_processes: bool = False,
    ) -> None:
        self.id = id
        self.ep_size = ep_size
        self.ranks = tuple(ranks)
        self.device = device
        self.max_tokens = max_tokens
        self.deadline_s = deadline_s
        self._has_processes = has_processes
        self._members: list[Group] = []
        _groups[id] = self
        weakref.finalize(self, torch.ops.weft.destroy_group, id)

    def __getitem__(self, rank: int) -> Group:
        """Rank `rank`'s own handle of a virtual group, for code that runs one rank a thread. Give
        the group `max_tokens` then: ranks in separate calls cannot agree on it. On a GPU, run
        backward under `torch.autograd.set_multithreading_enabled(False)`: autograd has one thread
        a device, which would wait in one rank's backward for the others."""
        if not self._members:
            raise TypeError("weft: only a virtual group of several ranks has a handle for each")
        return self._members[rank]

    # A module that is copied stays in its group. Pickled, a group's number could land on a stranger's
    # in another process; only the group of one process alone is the same everywhere.

    def __copy__(self) -> Group:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Group:
        return self

    def __reduce__(self) -> str:
        if self is LOCAL:
            return "LOCAL"
        raise TypeError(
            f"weft: {self} cannot be pickled: it stands for ranks and memory of this process. Save "
            "the module's state_dict() instead, and load it into a module made with a group there"
        )

    def __len__(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        return (
            f"Group(ep_size={self.ep_size}, ranks={self.ranks}, device={str(self.device)!r}, "
            f"max_tokens={self.max_tokens})"
        )

    @property
    def agrees_on_tokens(self) -> bool:
        """Whether the ranks have yet to agree on max_tokens, which a group of processes that was
        made without it does in its first call."""
        return self.max_tokens is None and self._has_processes

    def tokens_for(self, x: Sequence[Tensor], deadline_s: float) -> int:
        """max_tokens of a call with these x, which have been checked. Collective where the ranks
        have yet to agree on it."""
        if self.max_tokens is not None:
            return self.max_tokens
        largest = max(t.shape[0] if t.dim() else 0 for t in x)
        if not self._has_processes:
            return _round_up(largest)
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "weft: torch.compile must know the most tokens a rank brings: pass "
                "ep_group(..., max_tokens=), or make one call before compiling"
            )
        self.max_tokens = _round_up(
            torch.ops.weft.agree_on_max_tokens(self.id, largest, deadline_s)
        )
        return self.max_tokens


def ep_group(
    process_group: dist.ProcessGroup | DeviceMesh,
    *,
    device: torch.device | str | None = None,
    max_tokens: int | None = None,
    deadline_s: float = 0.0,
) -> Group:
    """The expert-parallel group of a torch process group. Collective over it.

    Args:
        process_group: the ranks, all of one machine; or a DeviceMesh of one dimension, such as
            `mesh["ep"]`.
        device: where the layer's tensors are. Default: the mesh's device, and for a process group
            "cuda" with NCCL, else "cpu".
        max_tokens: the most tokens a rank ever brings to one call; memory is sized by it. Default:
            at the first call the ranks agree on the largest T among them, rounded up to a multiple
            of 128.
        deadline_s: the longest wait for another rank, in seconds, here and in calls that do not
            set their own; 0 is 300.

    Raises:
        ValueError: the mesh has several dimensions, or the ranks are on different machines.
        RuntimeError: the device cannot be used, with the reason; or a rank did not come.
    """
    if isinstance(process_group, DeviceMesh):
        if process_group.ndim != 1:
            raise ValueError(
                f"weft: a mesh with dimensions {process_group.mesh_dim_names} has no one expert-"
                'parallel group: pass one of them, such as mesh["ep"]'
            )
        device = device or process_group.device_type
        process_group = process_group.get_group()
    if device is None:
        device = "cuda" if dist.get_backend(process_group) == "nccl" else "cpu"
    ep_rank, ep_size = process_group.rank(), process_group.size()
    device = _usable(device, ep_size)
    if ep_size == 1:
        return Group(torch.ops.weft.create_local_group(1), 1, (0,), device, max_tokens)

    # Rank 0 names the shared memory; hosts are compared before anyone waits in it.
    offers: list[tuple[str, str]] = [("", "")] * ep_size
    dist.all_gather_object(offers, (uuid.uuid4().hex, platform.node()), process_group)
    hosts = {host for _, host in offers}
    if len(hosts) > 1:
        raise ValueError(
            "weft: an expert-parallel group lives within one machine, these ranks are on "
            f"{', '.join(sorted(hosts))}: choose an expert-parallel mesh dimension inside one"
        )
    id = torch.ops.weft.create_shared_group(offers[0][0], ep_rank, ep_size, deadline_s)
    return Group(id, ep_size, (ep_rank,), device, max_tokens, deadline_s, has_processes=True)


def virtual_ep_group(
    ep_size: int, *, device: torch.device | str = "cpu", max_tokens: int | None = None
) -> Group:
    """A group whose ranks all live in this process, on one device: for tests and debugging.

    `weft.moe` with this group takes lists, one entry a rank, and runs the ranks together.
    `group[r]` is the handle of rank r alone.

    On a GPU, which takes up to 8, the ranks share its SMs and are launched as one kernel.

    Args:
        ep_size: ranks, 1 to 64.
        device: where the layer's tensors are.
        max_tokens: as for `ep_group`. Default: each call takes what it needs, rounded up to a
            multiple of 128.

    Raises:
        ValueError: ep_size is out of range.
        RuntimeError: the device cannot be used, with the reason.
    """
    if not 1 <= ep_size <= 64:
        raise ValueError(f"weft: ep_size = {ep_size}: a group has 1 to 64 ranks")
    device = _usable(device, ep_size)
    id = torch.ops.weft.create_local_group(ep_size)
    group = Group(id, ep_size, range(ep_size), device, max_tokens)
    if ep_size > 1:
        members = (torch.ops.weft.group_member(id, rank) for rank in range(ep_size))
        group._members = [
            Group(member, ep_size, (rank,), device, max_tokens)
            for rank, member in enumerate(members)
        ]
    return group


def group_of(id: int) -> Group:
    """The living group with this number."""
    return _groups[id]


def _round_up(num_tokens: int) -> int:
    return max(-(-num_tokens // TOKEN_GRANULARITY), 1) * TOKEN_GRANULARITY


def _usable(device: torch.device | str, ep_size: int) -> torch.device:
    device = torch.device(device)
    if reason := supports(
        hidden=1024, intermediate=1024, device=device, ep_size=ep_size, training=False
    ):
        raise RuntimeError(f"weft: {reason}")
    return device


# group=None: the one rank of this process.
LOCAL = Group(torch.ops.weft.create_local_group(1), 1, (0,), torch.device("cpu"), None)
