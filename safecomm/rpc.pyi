from torch.distributed.rpc import *
