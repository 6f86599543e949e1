"""SGLang's push kernels of all_reduce beside ours, where somebody has built them: ``PEERS=FOLDER``.

The folder has ``py/tvm_ffi``, the package apache-tvm-ffi 0.1.11, and in ``so/`` shared objects of SGLang 0.5.23 that
export functions by TVM_FFI_DLL_EXPORT_TYPED_FUNC: ``sgl_comm.so`` the function ``register_communicator`` of
``registry.cuh``, and for N ranks ``sgl_ar_N_pdl.so`` and ``sgl_ar_N_nopdl.so`` the function ``all_reduce``, which is
``AllReduceKernel<bf16_t, N, true>::run``, or false, of ``custom_all_reduce.cuh``.

These take any tensor, as ours do, and give a new one. They wait without end for a rank that does not come.
"""

import os
import sys

import torch
import torch.distributed as stock
import torch.distributed._symmetric_memory as memory

MIB = 1 << 20
SLOTS = {2: 64 * MIB, 4: 32 * MIB}
PULL_BLOCKS = 64
LARGEST = {"1shot_push": {2: 8 * MIB, 4: MIB}, "2shot_push": {2: 64 * MIB, 4: 64 * MIB}}
"""Bytes up to which each is timed: beyond that the other one is faster."""


class Kernels:
    """The kernels, and the memory that they share; it lives as long as this object."""

    def __init__(self, folder, device):
        sys.path.insert(0, os.path.join(folder, "py"))
        import tvm_ffi

        def load(name):
            return tvm_ffi.load_module(os.path.abspath(os.path.join(folder, "so", name)))

        def made(key):
            kind = type(key, (tvm_ffi.Object,), {"__init__": lambda self, *given: self.__ffi_init__(*given)})
            return tvm_ffi.register_object(f"sgl.distributed.{key}")(kind)

        self.world, rank = stock.get_world_size(), stock.get_rank()
        self._registry = load("sgl_comm.so")
        self._registry.register_communicator()
        push, pull, communicator = map(made, ("PushPlane", "PullPlane", "Communicator"))
        slot, pulled = SLOTS[self.world], 64 * MIB
        total = 2 * self.world * slot + pulled + 128 * PULL_BLOCKS
        self._block = memory.empty(total, dtype=torch.uint8, device=device)
        handle = memory.rendezvous(self._block, stock.group.WORLD.group_name)
        self._block.zero_()
        torch.cuda.synchronize()
        stock.barrier()
        slabs = [handle.get_buffer(peer, [total], torch.uint8) for peer in range(self.world)]

        def cut(at, *shape):
            nbytes = shape[0] * (shape[1] if len(shape) > 1 else 1)
            return [slab[at : at + nbytes].view(shape) for slab in slabs]

        blocks = torch.cuda.get_device_properties(device).multi_processor_count
        counters = torch.zeros(blocks, dtype=torch.int32, device=device).view(-1, 1).view(torch.uint8)
        torch.cuda.synchronize()
        at = 2 * self.world * slot
        planes = (
            push(rank, self.world, cut(0, 2 * self.world, slot), counters, 0),
            pull(rank, self.world, cut(at, pulled), cut(at + pulled, PULL_BLOCKS, 128), 0, 0),
        )
        self._communicator = communicator(*planes)
        self._kept = handle, slabs, counters, planes
        self._modules = {how: load(f"sgl_ar_{self.world}_{how}.so") for how in ("pdl", "nopdl")}

    def calls(self, nbytes, device, *, between):
        """Return calls of ``nbytes``, by name; ``between``: with a kernel that makes the next one's input of each."""
        tensor = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device)

        def of(algorithm, function):
            def call():
                found = function(self._communicator, tensor, algorithm, None, False)
                if between:
                    result = found if isinstance(found, torch.Tensor) else torch.from_dlpack(found)
                    torch.mul(result, 1, out=tensor)

            return call

        return {
            f"SGLang {algorithm}{'' if how == 'pdl' else ', without PDL'}": of(algorithm, module.all_reduce)
            for algorithm, largest in LARGEST.items()
            if nbytes <= largest[self.world]
            for how, module in self._modules.items()
        }
