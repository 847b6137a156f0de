"""Where runs are trained: processes of this machine, torchrun, Ray."""
