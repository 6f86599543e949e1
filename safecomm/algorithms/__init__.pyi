from torch.distributed.algorithms import *
