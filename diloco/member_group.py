"""The processes of one replica that train one model together: the leader's words, and the exchange of tensors.

Member 0 of a group is the *leader*. It runs a normal `DiLoCo`. The other members, the followers, execute its *words*
inside the same call. A word is a broadcast of a few integers, so a call without a round costs one small broadcast.

A model in `DistributedDataParallel` is the same in all members. The leader's model is then the model that takes part in
rounds, and after a round its changed tensors are broadcast. A model that `fully_shard` has cut into DTensors is put
together in the *mirror*: a copy of the model's tree whose tensors are whole and lie in memory that all members share.
Each member copies its shards into the mirror before a round, and out of it after the round. So a replica of several
processes looks to the run like a replica of one process.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum
from functools import partial
from itertools import zip_longest
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from xxhash import xxh3_64_intdigest

from diloco.errors import ContributionError, DiLoCoError
from diloco.fragments import Fragment
from diloco.tensor_names import WRAPPERS, by_clean_name, find_tensor, is_dtensor
from executors.process import close_shared_file, shared_file

WORD_LENGTH = 12
ALL = -1
"""The number that stands for all sharded parameters in the place of a fragment, also for those that no round
averages.
"""
ALIGNMENT = 64
"""Each tensor of the mirror begins at a multiple of this number of bytes, as torch's own allocations do."""


FACTOR = 1_000_003
"""An odd number, by which a digest is multiplied before the next tensor or piece is added."""
PIECE = 1 << 22
"""The number of bytes of a tensor on a device that are compared at once."""


class Call(IntEnum):
    """A call that all members make together. Each word has it, so that a member in another call notices that."""

    OPEN = 0
    STEP = 1
    UNDO = 2
    STOP = 3
    SYNC = 4
    ATTACH = 5
    STATE_DICT = 6
    LOAD = 7
    CLOSE = 8

    @property
    def text(self) -> str:
        """The call as users know it."""
        return (
            "DiLoCo(…)", "step()", "the end of the loop over steps()", "stop()", "sync()", "attach_state()",
            "state_dict()", "load_state_dict()", "close()",
        )[self]  # fmt: skip


FAILURE = "failure"
"""The key in the store of the members of a text that explains why a member has left."""


class Word(IntEnum):
    """The first integer of a word: the followers' next action."""

    RETURN = 0
    """Return from the call. 1 if a result follows, and then the status that followers keep."""
    GATHER = 1
    """Copy the shards of a fragment, or `ALL`, into the mirror."""
    ALIKE = 2
    """Compare the replicated parameters of a fragment between the members."""
    SCATTER = 3
    """Take the tensors whose numbers follow from the leader."""
    WEIGH = 4
    """Send the value of the member's own `weight` function."""
    KEEP = 5
    """Save the member's attached state, for a position."""
    ERROR = 6
    """Raise the error that follows."""
    ASK = 7
    """Exchange the values that the members have prepared for this call."""


# More than 20 methods: the leader and the followers have one method each for both ends of a word, in one place.
class Members:
    """The group of members of one replica, as one of the members sees it.

    Args:
        group: the process group of the members.
        store: a store of torch that no other DiLoCo uses, over which the members connect.
        model: this member's model.
        fragments: the fragments of the model, the same in all members.
        timeout_s: the longest wait for a word.

    Example:
        members = Members(group, store, model, fragments, timeout_s=1860.0)
    """

    def __init__(
        self, group: Any, store: Any, model: nn.Module, fragments: Sequence[Fragment], timeout_s: float
    ) -> None:
        self.number, self.size = group.rank(), group.size()
        self.fragments = tuple(fragments)
        self.model = model
        self._given = group
        self._store = store
        self._call, self._n_calls = Call.OPEN, 0
        self._failure: str | None = None
        """The reason why the members cannot meet any more. None: they can, or this DiLoCo is closed."""
        self.answers: list[Any] = []
        """By member, the value for the last word `ASK`."""
        # A group of its own, so that its collectives never meet the collectives of the training. It is not registered
        # with torch: torch would give a second group of the same ranks the name of a group that was destroyed.
        self._group: Any = dist.ProcessGroupGloo(store, self.number, self.size, timedelta(seconds=timeout_s))
        self._word = torch.zeros(WORD_LENGTH, dtype=torch.int64, device="cpu")
        # An array over the same memory: a word is sent in each step, and torch takes longer to set a few integers.
        self._integers = self._word.numpy()
        self._slots = [slot for fragment in self.fragments for slot in fragment.slots]
        self._fragment_of = {slot.name: fragment.index for fragment in self.fragments for slot in fragment.slots}
        self.is_in_call = False
        """True while all members are inside the same public call, so that followers hear the leader's words."""
        self._fresh: set[int] = set()
        """The fragments that were gathered, or written by the leader, in this call."""
        self._versions: dict[int, int] | None = None
        """For each slot, by its number: torch's count of writes before this call changed anything. None: nothing was
        changed.
        """
        self._check_slots()
        self._n_parameters = sum(slot.kind == "parameter" for slot in self._slots)
        self.mirror = self._mirror()
        """The model that takes part in rounds. In followers, it is None unless the model is sharded."""

    @property
    def is_leader(self) -> bool:
        """True in member 0."""
        return bool(self.number == 0)

    @property
    def is_sharded(self) -> bool:
        """True if the model has parameters of which each member holds a part."""
        return self._n_mirrored > 0

    def close(self) -> None:
        """Destroy the group. Otherwise the threads of gloo abort the process when the interpreter ends."""
        self._group = None

    def begin(self, call: Call) -> None:
        """Note the call that this member makes now.

        Args:
            call: the call.
        """
        self._call = call
        self._n_calls += 1

    def leave(self, reason: str) -> None:
        """Destroy the group before the other members have ended their calls, and leave them the reason.

        Args:
            reason: a sentence for their errors.
        """
        if self._group is not None:
            with suppress(RuntimeError):  # the process that has the store may have ended
                self._store.set(FAILURE, reason)
            self._failure = reason
            self.close()

    def _meet(self, begin: Callable[[Any], Any]) -> None:
        """Take part in a collective.

        Args:
            begin: begins it in the group, and returns its work.

        Raises:
            DiLoCoError: another member has ended, has left, or makes another call.
        """
        if self._group is None:
            raise DiLoCoError(self._failure or "This DiLoCo is closed, so the processes of its replica no longer meet.")
        try:
            begin(self._group).wait()
        except RuntimeError as error:
            self._failure = self._reason_of_failure()
            self.close()  # a later call would wait again
            raise DiLoCoError(self._failure) from error

    def _reason_of_failure(self) -> str:
        """Return why a collective has failed: the text that a member has left, or that a member has ended."""
        with suppress(RuntimeError):
            if self._store.check([FAILURE]):
                return str(self._store.get(FAILURE).decode())
        return (
            f"Member {self.number} of this replica waited in {self._call.text}, call {self._n_calls} of its DiLoCo, "
            "for another member, which has ended or does not answer. Look for the error of that member first."
        )

    def _refuse_other_call(self, number: int, call: int) -> None:
        """Leave, because the leader makes another call than this member.

        Raises:
            DiLoCoError: always.
        """
        text = (
            f"Member {self.number} of this replica calls {self._call.text} as call {self._n_calls} of its DiLoCo, and "
            f"member 0 calls {Call(call).text} as call {number}. All members must make the same calls in the same "
            "order: do not end the loop of one member alone."
        )
        self.leave(text)
        raise DiLoCoError(text)

    def _broadcast(self, tensor: Tensor) -> None:
        """Overwrite a tensor by the leader's."""
        self._meet(lambda group: group.broadcast(tensor, 0))

    def barrier(self) -> None:
        """Wait until all members are here."""
        self._meet(lambda group: group.barrier())

    def agree(self, error: BaseException | None) -> BaseException | None:
        """Return the error of the first member that has one. All members call it at the same time.

        Args:
            error: the error of code of the user in this member. None: there was none.
        """
        failed = torch.tensor([error is not None], dtype=torch.int64, device="cpu")
        self._meet(lambda group: group.allreduce([failed]))
        return self._first_error(error) if int(failed) else None

    def _first_error(self, error: BaseException | None) -> BaseException:
        if error is not None:
            error.add_note(f"It was raised in member {self.number} of this replica.")
        found = self.exchange(None if error is None else _packed_error(error))
        return _unpacked_error(next(data for data in found if data is not None))

    def broadcast(self, value: Any = None) -> Any:
        """Return the leader's value. All members call it at the same time.

        Args:
            value: the value of the leader. It is ignored in followers.
        """
        data = pickle.dumps(value) if self.is_leader else b""
        size = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
        self._broadcast(size)
        room = np.frombuffer(bytearray(data) if self.is_leader else bytearray(int(size)), np.uint8)
        self._broadcast(torch.from_numpy(room))
        return value if self.is_leader else pickle.loads(room.data)

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all members, by their numbers. All members call it at the same time.

        Args:
            value: the value of this member.
        """
        data = pickle.dumps(value)
        mine = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
        sizes = [torch.zeros_like(mine) for _ in range(self.size)]
        self._meet(lambda group: group.allgather([sizes], [mine]))
        largest = max(map(int, sizes))
        rooms = [torch.zeros(largest, dtype=torch.uint8, device="cpu") for _ in range(self.size)]
        padded = torch.from_numpy(np.frombuffer(data.ljust(largest, b"\0"), np.uint8).copy())
        self._meet(lambda group: group.allgather([rooms], [padded]))
        return [pickle.loads(room.numpy().data) for room in rooms]

    def _check_slots(self) -> None:
        """Refuse members that train different parameters, as the stages of a pipeline do.

        Raises:
            DiLoCoError: a member has other parameters or buffers than member 0.
        """
        mine = [(slot.name, slot.shape, slot.dtype) for slot in self._slots]
        found = self.exchange(mine)
        for member, slots in enumerate(found):
            if slots != found[0]:
                other = next((a or b for a, b in zip_longest(slots, found[0]) if a != b), ("",))
                raise DiLoCoError(
                    f"Member {member} of this replica does not have the same parameters as member 0: {other[0]!r} "
                    "differs. DiLoCo trains one whole model in a replica, and not the stages of a pipeline."
                )

    # -- the mirror --------------------------------------------------------------------------------------------------

    def _mirror(self) -> nn.Module | None:
        sharded = {id(p): (name, p) for name, p in named_parameters(self.model) if is_dtensor(p)}
        self._n_mirrored = len(sharded)
        self._whole: dict[str, Tensor] = {}
        """The whole tensor of each sharded parameter, in shared memory, by the parameter's clean name."""
        if not sharded:
            return self.model if self.is_leader else None
        places: dict[str, int] = {}
        size = 0
        for name, p in sharded.values():
            places[name] = size
            size += -(-prod(p.shape) * p.dtype.itemsize // ALIGNMENT) * ALIGNMENT
        memory = self._shared_memory(max(size, 1))
        for name, p in sharded.values():
            n_bytes = prod(p.shape) * p.dtype.itemsize
            part = torch.from_numpy(memory[places[name] : places[name] + n_bytes])
            self._whole[name] = part.view(p.dtype).view(p.shape)
        if not self.is_leader:
            return None
        whole = {
            key: nn.Parameter(self._whole[name], requires_grad=p.requires_grad) for key, (name, p) in sharded.items()
        }
        return _tree_with(self.model, whole)

    def _shared_memory(self, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return memory that all members share. On Linux the file has no name, so none is left behind."""
        descriptor, path = shared_file(size) if self.is_leader else (-1, "")
        path = self.broadcast(path)
        try:
            mapped = np.memmap(path, np.uint8, "r+", shape=(size,))
            problem = None
        except OSError as error:
            mapped, problem = None, str(error)
        problems = self.exchange(problem)  # this exchange also waits until all members have mapped the memory
        if descriptor >= 0:
            close_shared_file(descriptor, path)
        for member, found in enumerate(problems):
            if found is not None:
                raise DiLoCoError(
                    f"Member {member} cannot map the memory of member 0 ({found}). All processes of a sharded replica "
                    "must be on one machine and in one container."
                )
        assert mapped is not None
        return mapped.view(np.ndarray)

    # -- the leader's side -------------------------------------------------------------------------------------------

    def say(self, word: Word, *values: int) -> None:
        """Send a word to the followers. Outside of a call they do not listen, so nothing is sent.

        Args:
            word: the word.
            values: up to 9 integers.
        """
        if not self.is_in_call or not self.is_leader:
            return
        self._integers[:] = (word, self._n_calls, self._call, *values, *(0,) * (WORD_LENGTH - 3 - len(values)))
        self._broadcast(self._word)

    def need(self, fragments: Iterable[int], *, compare: bool = False) -> None:
        """Bring the shards of fragments into the mirror, unless this call has done so or has written them.

        Args:
            fragments: the numbers of the fragments.
            compare: True: also compare the replicated parameters of the members.
        """
        if not self.is_in_call:
            return
        for index in fragments:
            if index in self._fresh:
                # the leader may have written to the fragment since, and the followers do not have these values yet
                continue
            self._fresh.add(index)
            if self.is_sharded:
                self.say(Word.GATHER, index)
                self._gather(index)
            if compare and self._n_mirrored < self._n_parameters:
                self._check_alike(index)
        self.note_writes()

    def gather_all(self) -> None:
        """Bring the shards of all parameters into the mirror."""
        if self.is_sharded:
            self.say(Word.GATHER, ALL)
            self._gather(ALL)

    def scatter_all(self) -> None:
        """Send all slots to the followers, whether this call has written them or not."""
        self._versions = None
        self.scatter(range(len(self._slots)))

    def note_all_written(self) -> None:
        """Note that this call writes all fragments without reading them, so that none must be gathered."""
        self._fresh.update(range(len(self.fragments)))
        self.note_writes()

    def note_writes(self) -> None:
        """Note that this call may write to the leader's tensors from now on."""
        if self._versions is None and self.is_in_call and self.mirror is not None:
            self._versions = {number: t._version for number, t in enumerate(self._leaders_tensors())}

    def _leaders_tensors(self) -> Iterator[Tensor]:
        assert self.mirror is not None
        for slot in self._slots:
            yield find_tensor(self.mirror, slot.name, slot.kind)

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Return a context for a call of the leader. At its end, the followers get the tensors that the call has
        written.

        An error in the call is raised in all members.
        """
        self.is_in_call, self._versions = True, None
        self._fresh.clear()
        try:
            yield
            self.scatter_written()
        except BaseException as error:
            self._say_error(error)
            raise
        finally:
            self.is_in_call = False

    def scatter_written(self) -> None:
        """Send the tensors that this call has written so far to the followers."""
        before, self._versions = self._versions, None
        if before is None:
            return
        written = [number for number, t in enumerate(self._leaders_tensors()) if t._version != before[number]]
        self.scatter(written)

    def scatter(self, numbers: Sequence[int]) -> None:
        """Send slots to the followers.

        Args:
            numbers: the numbers of the slots, in ascending order.
        """
        at = 0
        while at < len(numbers):  # ranges of neighbors, because a word is short and mostly all slots have changed
            end = at + 1
            while end < len(numbers) and numbers[end] == numbers[end - 1] + 1:
                end += 1
            first, last = numbers[at], numbers[end - 1]
            self.say(Word.SCATTER, first, last + 1)
            self._take(first, last + 1)
            at = end

    def return_(self, status: Sequence[int], result: object) -> None:
        """Send the word with which the followers return from the call.

        Args:
            status: up to 8 integers that followers keep.
            result: the result of the call. None is not sent.
        """
        self.is_in_call = True
        try:
            self.say(Word.RETURN, int(result is not None), *status)
            if result is not None:
                self.broadcast(result)
        finally:
            self.is_in_call = False

    def _say_error(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt) or self._group is None:
            return  # the followers get the same signal, or end for a reason of their own
        try:
            self.say(Word.ERROR)
            self.broadcast(_packed_error(error))
        except DiLoCoError as other:  # a member has ended, and the error of the call is what the user must see
            error.add_note(f"The other members of this replica did not get this error: {other}")

    # -- the followers' side -----------------------------------------------------------------------------------------

    def obey(
        self, weigh: Callable[[], float], keep: Callable[[int], None], answer: Any = None
    ) -> tuple[Sequence[int], Any]:
        """Execute the words of the leader until the leader returns from the call.

        Args:
            weigh: returns the value of this member's `weight`.
            keep: saves attached state for a position.
            answer: the value for the word `ASK`. Default None.

        Returns:
            The integers of the last word, and the result of the call.

        Raises:
            DiLoCoError: the leader makes another call, or a member has ended.
        """
        while True:
            self._broadcast(self._word)
            word, number, call, *values = self._integers.tolist()
            if (number, call) != (self._n_calls, self._call):
                self._refuse_other_call(number, call)
            if word == Word.RETURN:
                return values[1:], self.broadcast() if values[0] else None
            if word == Word.GATHER:
                self._gather(values[0])
            elif word == Word.ALIKE:
                self._digests(values[0])  # the leader compares the digests, and sends the word ERROR if they differ
            elif word == Word.SCATTER:
                self._take(values[0], values[1])
            elif word == Word.WEIGH:
                self.sum_of(weigh)
            elif word == Word.KEEP:
                self.agree(error_of(partial(keep, values[0])))  # the leader raises it, and an ERROR follows
            elif word == Word.ASK:
                self.answers = self.exchange(answer)
            else:
                raise _unpacked_error(self.broadcast())

    # -- both --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _gather(self, index: int) -> None:
        """Copy this member's shards of a fragment into the mirror, and wait for the other members."""
        for name, p in named_parameters(self.model):
            whole = self._whole.get(name)
            if whole is not None and (index == ALL or self._fragment_of.get(name) == index):
                place, is_writer = _place_of(p)
                if is_writer:
                    whole[place].copy_(p.to_local())
        self.barrier()

    @torch.no_grad()
    def _take(self, first: int, end: int) -> None:
        """Receive the leader's values of slots: from the mirror, or by broadcast."""
        for slot in self._slots[first:end]:
            if slot.name in self._whole:
                continue
            live = find_tensor(self.model, slot.name, slot.kind)
            if live.device.type != "cpu" and live.is_contiguous():
                dist.broadcast(live.detach(), group=self._given, group_src=0)
                continue
            flat = live.detach().to("cpu").contiguous()
            self._broadcast(flat)
            if not self.is_leader and flat.data_ptr() != live.data_ptr():
                live.detach().copy_(flat)
        for slot in self._slots[first:end]:
            if (whole := self._whole.get(slot.name)) is not None:
                p: Any = find_tensor(self.model, slot.name, slot.kind)
                p.to_local().detach().copy_(whole[_place_of(p)[0]])
        if self.is_sharded:
            self.barrier()  # from here on, the leader may write to the mirror again

    def _check_alike(self, index: int) -> None:
        """Compare the replicated parameters of a fragment.

        Raises:
            ContributionError: a member has other parameters than member 0.
        """
        self.say(Word.ALIKE, index)
        digests = self._digests(index)
        for member, digest in enumerate(digests):
            if digest != digests[0]:
                raise ContributionError(
                    f"Member {member} of this replica has other parameters than member 0, so only the work of one "
                    "would count. Wrap the model in DistributedDataParallel, or shard it by fully_shard."
                )

    @torch.no_grad()
    def _digests(self, index: int) -> list[int]:
        """Return a digest of each member's replicated parameters in a fragment. All members call it together."""
        values = [
            find_tensor(self.model, slot.name, slot.kind).detach()
            for slot in self.fragments[index].slots
            if slot.kind == "parameter" and slot.name not in self._whole
        ]
        mine = torch.tensor([_digest_of(values)], dtype=torch.int64, device="cpu")
        found = [torch.zeros_like(mine) for _ in range(self.size)]
        self._meet(lambda group: group.allgather([found], [mine]))
        return [int(digest) for digest in found]

    def sum_of(self, weigh: Callable[[], float]) -> float:
        """Return the sum of a function over all members. Followers get 0 if a member has failed.

        Args:
            weigh: the function of this member.

        Raises:
            BaseException: in the leader, the error of the first member whose function has raised one.
        """
        if not self.is_in_call and self.is_leader:
            return weigh()
        self.say(Word.WEIGH)
        weights: list[float] = []
        error = error_of(lambda: weights.append(_checked_weight(weigh(), self.number)))
        # The others wait for this member's number, so a failed member sends one, too.
        total = torch.tensor([*(weights or [0.0]), float(error is not None)], dtype=torch.float64, device="cpu")
        self._meet(lambda group: group.allreduce([total]))
        if not float(total[1]):
            return float(total[0])
        first = self._first_error(error)
        if self.is_leader:
            raise first
        return 0.0

    def ask(self, answer: Any) -> list[Any]:
        """Return the values of all members, by their numbers. Only the leader calls it, inside a call.

        Args:
            answer: the value of the leader. The other members gave theirs to `obey`.
        """
        self.say(Word.ASK)
        return self.exchange(answer)

    def keep(self, position: int) -> None:
        """Let the followers save their attached state.

        Args:
            position: the position for which it is saved.

        Raises:
            BaseException: the error of the first member whose state could not be taken.
        """
        if not self.is_in_call:
            return
        self.say(Word.KEEP, position)
        if (error := self.agree(None)) is not None:
            raise error


def named_parameters(model: nn.Module) -> Iterable[tuple[str, Any]]:
    """Return the parameters of a model by their clean names.

    Args:
        model: the model.
    """
    return by_clean_name(model, model.named_parameters()).items()


def _place_of(p: Any) -> tuple[tuple[slice, ...], bool]:
    """Return the place of this member's shard in the whole tensor, and True if this member writes it.

    If several members hold the same shard, the first one writes it.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    place = tuple(slice(at, at + n) for at, n in zip(offset, shape, strict=True))
    where = p.device_mesh.get_coordinate() or []
    is_writer = all(at == 0 for at, placement in zip(where, p.placements, strict=True) if placement.is_replicate())
    return place, is_writer


def _tree_with(model: nn.Module, parameters: Mapping[int, nn.Parameter]) -> nn.Module:
    """Return a copy of a model's tree of modules that has other parameters in place of some of its own.

    All other tensors are the model's. Modules keep their classes, so names and layers are found as in the model.

    Args:
        model: the model.
        parameters: the parameters of the copy, by the id of the parameter of the model that each replaces.
    """
    copies: dict[int, nn.Module] = {}

    def copy_of(module: nn.Module) -> nn.Module:
        if id(module) in copies:
            return copies[id(module)]
        copied: nn.Module = object.__new__(type(module))
        copies[id(module)] = copied
        state = dict(module.__dict__)
        for name in list(state):  # the copy gets no hooks, because hooks belong to the training of the model
            if name.endswith("_hooks") or name.startswith(("_forward_hooks", "_backward_hooks")):
                state[name] = type(state[name])() if isinstance(state[name], dict) else state[name]
        state["_parameters"] = {
            name: None if p is None else parameters.get(id(p), p) for name, p in module._parameters.items()
        }
        state["_buffers"] = dict(module._buffers)
        state["_modules"] = {name: None if child is None else copy_of(child) for name, child in module._modules.items()}
        copied.__dict__.update(state)
        for name in WRAPPERS:  # some wrappers also hold the wrapped module as an attribute
            if name in state and isinstance(state[name], nn.Module):
                copied.__dict__[name] = copy_of(state[name])
        return copied

    return copy_of(model)


def _digest_of(values: Sequence[Tensor]) -> int:
    """Return a number of 63 bits that differs if the bits of tensors differ."""
    total = 0
    for tensor in values:
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        if flat.device.type != "cpu":
            digest = weighted_sum(flat)
        else:
            digest = xxh3_64_intdigest(flat.numpy().data) if flat.numel() else 0
        total = (total * FACTOR + digest) % (1 << 63)
    return total


def weighted_sum(flat: Tensor) -> int:
    """Return a sum of bytes, each weighted by its place. It is computed on the device of the bytes.

    Args:
        flat: the bytes, with shape `(n,)`. They are read in pieces, because a product has eight times their size.
    """
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    places = torch.arange(1, min(flat.numel(), PIECE) + 1, device=flat.device)
    for begin in range(0, flat.numel(), PIECE):
        piece = flat[begin : begin + PIECE]
        # an overflow of int64 wraps around, which is intended
        total = total * FACTOR + (piece.to(torch.int64) * places[: piece.numel()]).sum()
    return int(total)


def error_of(act: Callable[[], object]) -> BaseException | None:
    """Call code of the user, and return its error. None: there was none.

    Args:
        act: the code.

    Example:
        members.agree(error_of(lambda: optimizer.load_state_dict(state)))
    """
    try:
        act()
    except BaseException as error:  # noqa: BLE001 - it is raised in all members together
        return error
    return None


def _checked_weight(value: Any, member: int) -> float:
    """Return the value of a member's `weight` function as a number.

    Raises:
        ContributionError: it is not a number, or is negative.
    """
    if hasattr(value, "item"):
        with suppress(RuntimeError, ValueError):  # a tensor or array with more than one element
            value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ContributionError(
            f"Member {member} of this replica: weight must return a number that is not negative, got {value!r}."
        )
    return float(value)


def _packed_error(error: BaseException) -> bytes:
    """Return an error as bytes, with its type if that can be pickled."""
    with suppress(Exception):
        data = pickle.dumps(error)
        pickle.loads(data)  # some errors can be pickled but not unpickled
        return data
    return pickle.dumps(DiLoCoError(f"{type(error).__name__}: {error}"))


def _unpacked_error(data: bytes) -> BaseException:
    error = pickle.loads(data)  # the pickle comes from the leader of the same replica, so it is trusted
    assert isinstance(error, BaseException)
    # The outcome of the replica then names the leader, whose traceback has the place of the error.
    error.of_another_member = True  # type: ignore[attr-defined]
    return error
