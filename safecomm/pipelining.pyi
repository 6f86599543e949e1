from torch.distributed.pipelining import *
