# The one list of kernel instances: dtype x head_dim tile x family. A problem runs on the smallest tile that holds both
# of its head dims. From this list come the .cu files that instantiate the launchers and the registry's tables.
#
#   dlattn_instance(<family> <dtype> <head_dim tiles, ascending>...)

dlattn_instance(scalar float16 64 128 256)
dlattn_instance(scalar bfloat16 64 128 256)
dlattn_instance(scalar float32 64 128 256)

dlattn_instance(wmma_qk float16 32 64 96 128)
dlattn_instance(wmma_qk bfloat16 32 64 96 128)

dlattn_instance(wmma_smem float16 32 64 96 128)
dlattn_instance(wmma_smem bfloat16 32 64 96 128)

dlattn_instance(wmma float16 32 64 96 128 192 256)
dlattn_instance(wmma bfloat16 32 64 96 128 192 256)

# Only for compute capability 9.0, and by its own instructions, so compiled for sm_90a alone (src/cuda/CMakeLists.txt).
dlattn_instance(sm90 float16 64 96 128 192 256)
dlattn_instance(sm90 bfloat16 64 96 128 192 256)
