from torch.distributed.fsdp import *
