from torch.distributed.nn import *
