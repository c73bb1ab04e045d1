"""The recurrence on NVIDIA GPUs: kernels in CUDA C++, how they are launched, and the operators that run them.

- `kind.py`: what a program is compiled for, and what of a GPU matters;
- `small.cu`, `small.py`: up to 128 units, a block holds the matrices in registers;
- `large.cu`, `large.py`: more units, many blocks hold them together;
- `passes.py`: a forward or backward pass, memory and launches;
- `over_steps.py`: the products over all steps, by `product.py` and its kernels or by torch;
- `gpu.py`, `operator.py`: the passes on a GPU, as operators of torch.
"""
