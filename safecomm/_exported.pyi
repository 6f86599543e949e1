# What torch.distributed has, and does not export as type checkers see it.
from torch._C._distributed_c10d import BuiltinCommHookType as BuiltinCommHookType
from torch._C._distributed_c10d import DebugLevel as DebugLevel
from torch._C._distributed_c10d import FileStore as FileStore
from torch._C._distributed_c10d import GradBucket as GradBucket
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch._C._distributed_c10d import get_debug_level as get_debug_level
from torch._C._distributed_c10d import set_debug_level as set_debug_level
from torch._C._distributed_c10d import set_debug_level_from_env as set_debug_level_from_env
from torch.distributed import algorithms as algorithms
from torch.distributed import autograd as autograd
from torch.distributed import constants as constants
from torch.distributed import device_mesh as device_mesh
from torch.distributed import distributed_c10d as distributed_c10d
from torch.distributed import rpc as rpc
from torch.distributed import utils as utils
from torch.distributed.device_mesh import *
from torch.distributed.rendezvous import *
