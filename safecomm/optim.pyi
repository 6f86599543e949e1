from torch.distributed.optim import *
