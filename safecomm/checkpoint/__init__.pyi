from torch.distributed.checkpoint import *
