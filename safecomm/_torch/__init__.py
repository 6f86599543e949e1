"""Every private name of torch and of the CUDA driver that safecomm leans on, each with what stands in when it is gone.

Nothing else in the package touches a private name. :func:`safecomm._torch.names.look_up` looks each of them up, and
tries whether the name still is what safecomm takes it for. Where it is not, a slower way stands in, :data:`LACKING`
says so, and the doctor repeats it. Nothing private can break the import, but for the few names of :data:`REQUIRED`,
without which the memory of a call of c10d can't be held. ``tests/test_private_names.py`` takes away each in turn.

The rest of safecomm uses ``_torch.x``. The imports below are the list of what there is, and nothing else is used of
the files here. A test that replaces ``_torch.x`` replaces it for the rest of safecomm, and not for the files here.
"""

# The direction of dependency: a file imports only from lines below its own.
#
#     launches       how collectives are launched directly, without c10d's own functions
#     functional     functional collectives, and the registry of their works
#     registry       c10d's registry of groups
#     backends       the classes of backends, their timeouts, how their works wait, their memory on a device
#     regions        coalescing regions
#     symmetric      torch's memory that peers can write to
#     tensors        which tensors are plain, fake, alike
#     lists          operations on lists of tensors
#     storages       references to storages, their death, storages over given memory
#     modes          modes, transforms and profilers that are active on this thread
#     autograd       saved tensors, version counters, the level of forward mode
#     observing      the allocator's history, and the flight recorder of collectives
#     debugging      pages in torch's debug server
#     reductions     the operators that c10d's reductions come down to, replaced
#     kernels        torch's own kernels, replaced by functions of Python
#     replaced       what stands in torch's place, and how torch's own comes back
#     native         what each call asks: in C, if that was built, or by ctypes
#     streams        the current device and stream, raw handles
#     segment_table  which stream a segment is of, by the driver's id of it
#     driver         the CUDA driver
#     links          NVML: how GPUs are connected
#     allocator      the caching allocator
#     names          how a name is looked up and tried out, and what is reported of it
#     submodules     torch.distributed's submodules under our name
#     versions       the versions of torch that were tested, and what is said of the others

# First, because it refuses a torch that lacks what the rest imports.
from safecomm._torch import versions as versions

# isort: split

from safecomm._torch import submodules as submodules
from safecomm._torch.allocator import end_allocation_to_pool as end_allocation_to_pool
from safecomm._torch.allocator import segments as segments
from safecomm._torch.autograd import forward_ad as forward_ad
from safecomm._torch.autograd import increment_versions as increment_versions
from safecomm._torch.autograd import saved_by as saved_by
from safecomm._torch.backends import GLOO as GLOO
from safecomm._torch.backends import NCCL as NCCL
from safecomm._torch.backends import NCCL2 as NCCL2
from safecomm._torch.backends import NCCL_LAZY as NCCL_LAZY
from safecomm._torch.backends import Backend as Backend
from safecomm._torch.backends import FakeWork as FakeWork
from safecomm._torch.backends import backend_of as backend_of
from safecomm._torch.backends import group_timeout as group_timeout
from safecomm._torch.backends import has_context as has_context
from safecomm._torch.backends import is_initialized as is_initialized
from safecomm._torch.backends import is_nccl4py as is_nccl4py
from safecomm._torch.backends import nccl_memory_of as nccl_memory_of
from safecomm._torch.backends import regions_differ as regions_differ
from safecomm._torch.backends import unwrapped as unwrapped
from safecomm._torch.backends import waits_only_block_streams as waits_only_block_streams
from safecomm._torch.debugging import DebugRequest as DebugRequest
from safecomm._torch.debugging import DebugResponse as DebugResponse
from safecomm._torch.debugging import ask_all_ranks as ask_all_ranks
from safecomm._torch.debugging import register_debug_handler as register_debug_handler
from safecomm._torch.driver import kernel_launcher as kernel_launcher
from safecomm._torch.driver import pointer_attribute as pointer_attribute
from safecomm._torch.driver import swap_capture_mode as swap_capture_mode
from safecomm._torch.functional import functional_collectives as functional_collectives
from safecomm._torch.functional import group_named as group_named
from safecomm._torch.functional import inflight_as_graph_input as inflight_as_graph_input
from safecomm._torch.functional import register_work as register_work
from safecomm._torch.functional import unwaited as unwaited
from safecomm._torch.kernels import OVERRIDDEN as OVERRIDDEN
from safecomm._torch.kernels import Override as Override
from safecomm._torch.kernels import kernel_of_all_devices as kernel_of_all_devices
from safecomm._torch.launches import ASYNC_OPTION as ASYNC_OPTION
from safecomm._torch.launches import COALESCED as COALESCED
from safecomm._torch.launches import Launch as Launch
from safecomm._torch.launches import all_gather as all_gather
from safecomm._torch.launches import all_gather_list as all_gather_list
from safecomm._torch.launches import all_reduce as all_reduce
from safecomm._torch.launches import all_to_all as all_to_all
from safecomm._torch.launches import all_to_all_single as all_to_all_single
from safecomm._torch.launches import broadcast as broadcast
from safecomm._torch.launches import gather as gather
from safecomm._torch.launches import is_torchs as is_torchs
from safecomm._torch.launches import reduce as reduce
from safecomm._torch.launches import reduce_scatter as reduce_scatter
from safecomm._torch.launches import reduce_scatter_list as reduce_scatter_list
from safecomm._torch.launches import scatter as scatter
from safecomm._torch.links import not_linked as not_linked
from safecomm._torch.lists import copy_all as copy_all
from safecomm._torch.lists import unflatten as unflatten
from safecomm._torch.modes import TorchDispatchMode as TorchDispatchMode
from safecomm._torch.modes import dispatch_modes as dispatch_modes
from safecomm._torch.modes import has_torch_function as has_torch_function
from safecomm._torch.modes import inference_mode as inference_mode
from safecomm._torch.modes import probing as probing
from safecomm._torch.modes import profiler as profiler
from safecomm._torch.modes import transform as transform
from safecomm._torch.modes import undisturbed as undisturbed
from safecomm._torch.modes import without_functions as without_functions
from safecomm._torch.modes import without_import as without_import
from safecomm._torch.names import LACKING as LACKING
from safecomm._torch.names import NAMES as NAMES
from safecomm._torch.names import missing as missing
from safecomm._torch.names import warn_of_missing as _warn_of_missing
from safecomm._torch.native import WHY_CTYPES as WHY_CTYPES
from safecomm._torch.native import capture_id as capture_id
from safecomm._torch.native import is_capturing as is_capturing
from safecomm._torch.native import new_segment_table as new_segment_table
from safecomm._torch.native import threads_are_free as threads_are_free
from safecomm._torch.observing import FlightEntry as FlightEntry
from safecomm._torch.observing import dump_snapshot as dump_snapshot
from safecomm._torch.observing import flight_entries as flight_entries
from safecomm._torch.observing import on_out_of_memory as on_out_of_memory
from safecomm._torch.observing import record_history as record_history
from safecomm._torch.observing import when_cuda_starts as when_cuda_starts
from safecomm._torch.reductions import REDUCTIONS as REDUCTIONS
from safecomm._torch.reductions import boxed as boxed
from safecomm._torch.reductions import complete_work as complete_work
from safecomm._torch.reductions import replace_reduction as replace_reduction
from safecomm._torch.reductions import unboxed as unboxed
from safecomm._torch.reductions import unfollowed as unfollowed
from safecomm._torch.reductions import why_not_replaced as why_not_replaced
from safecomm._torch.regions import CoalescingManager as CoalescingManager
from safecomm._torch.regions import CollOp as CollOp
from safecomm._torch.regions import IllegalWork as IllegalWork
from safecomm._torch.regions import coalescing_manager as coalescing_manager
from safecomm._torch.regions import end_coalescing as end_coalescing
from safecomm._torch.registry import DEFAULT as DEFAULT
from safecomm._torch.registry import HOOKS as HOOKS
from safecomm._torch.registry import REQUIRED as REQUIRED
from safecomm._torch.registry import WORLD as WORLD
from safecomm._torch.registry import all_groups as all_groups
from safecomm._torch.registry import c10d_vars as c10d_vars
from safecomm._torch.registry import default_group as default_group
from safecomm._torch.registry import group_name as group_name
from safecomm._torch.registry import groups as groups
from safecomm._torch.registry import on_each_group as on_each_group
from safecomm._torch.registry import open_regions as open_regions
from safecomm._torch.registry import store_of as store_of
from safecomm._torch.registry import world as world
from safecomm._torch.replaced import Replaced as Replaced
from safecomm._torch.replaced import Shared as Shared
from safecomm._torch.segment_table import GRANULE as GRANULE
from safecomm._torch.segment_table import UNKNOWN as UNKNOWN
from safecomm._torch.segment_table import Segment as Segment
from safecomm._torch.segment_table import buffer_id as buffer_id
from safecomm._torch.storages import KEPT as KEPT
from safecomm._torch.storages import MAKES_STORAGES as MAKES_STORAGES
from safecomm._torch.storages import USE_COUNT as USE_COUNT
from safecomm._torch.storages import StorageWeakRef as StorageWeakRef
from safecomm._torch.storages import WeakStorage as WeakStorage
from safecomm._torch.storages import before_sharing as before_sharing
from safecomm._torch.storages import cdata_of as cdata_of
from safecomm._torch.storages import keeps_attributes as keeps_attributes
from safecomm._torch.storages import non_owning_alias as non_owning_alias
from safecomm._torch.storages import only_holder as only_holder
from safecomm._torch.storages import storage_over as storage_over
from safecomm._torch.storages import storage_use_count as storage_use_count
from safecomm._torch.streams import current_device as current_device
from safecomm._torch.streams import current_raw_stream as current_raw_stream
from safecomm._torch.streams import raw_stream as raw_stream
from safecomm._torch.symmetric import symmetric_memory as symmetric_memory
from safecomm._torch.tensors import ELSEWHERE as ELSEWHERE
from safecomm._torch.tensors import HOST as HOST
from safecomm._torch.tensors import has_plain_keys as has_plain_keys
from safecomm._torch.tensors import index_of as index_of
from safecomm._torch.tensors import leave_all_empty as leave_all_empty
from safecomm._torch.tensors import look_alike as look_alike
from safecomm._torch.tensors import unlike as unlike

_warn_of_missing()
