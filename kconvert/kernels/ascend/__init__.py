"""What the NPU kernels compute with: the fused operators of `torch_npu`, called as its schemas have them.

The schemas that every call is held against in tests are those of the release that `tests/npu` names.  Nothing here has run on an
NPU.
"""
