from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import *
