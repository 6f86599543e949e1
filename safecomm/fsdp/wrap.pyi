from torch.distributed.fsdp.wrap import *
