from torch.distributed.algorithms.ddp_comm_hooks import *
