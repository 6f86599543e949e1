"""What safecomm is for, shown: a program that is measured on GPUs, and elsewhere what was recorded of one."""
