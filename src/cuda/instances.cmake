# The one list of families and kernel instances: operation x family x dtype x head_dim tile x architecture. A problem
# runs on the smallest tile that holds both of its head dims; a tile of 0 holds any. From this list come the .cu files
# that instantiate the launchers, core's lists of families and the registry's table. Families of an operation are asked
# in this order: the fastest ones come first, after which plans of the others end early.
#
#   dlattn_family(<operation> <family> [ARCH <arch>] [TILES_PER_FILE <n>] [IN <file>] [THEN <operation>] [WITHOUT_PLAN])
#                                                                  for all architectures, or for one alone; IN: the file
#                                                                  that it shares with other families; THEN: the
#                                                                  operation of a launch that may follow the family's own;
#                                                                  WITHOUT_PLAN: plans of other families list its launches
#   dlattn_instance(<operation> <family> <dtype> <head_dim tiles, ascending>... [IN <file>])

# A family's instances are compiled as one file, or where that takes long as files of a few tiles each, and small families
# together. Fewer files take less time on few cores: to read the headers, once for the host and once an architecture,
# takes as long as a small kernel. More files let a driver start sooner from PTX: at the first call of a kernel it
# compiles all that are in its file.
dlattn_family(forward wmma TILES_PER_FILE 2)
dlattn_instance(forward wmma float16 32 64 96 128 192 256)
dlattn_instance(forward wmma bfloat16 32 64 96 128 192 256)

dlattn_family(forward sm90 ARCH 90a TILES_PER_FILE 5)
dlattn_instance(forward sm90 float16 64 96 128 192 256)
dlattn_instance(forward sm90 bfloat16 64 96 128 192 256)

dlattn_family(forward decode TILES_PER_FILE 1 THEN combine)
dlattn_instance(forward decode float16 64 128 256 576)
dlattn_instance(forward decode bfloat16 64 128 256 576)
dlattn_instance(forward decode float8_e4m3fn 64 128 256 576)  # of k and v, beside q of either
dlattn_instance(forward decode int8 64 128 256 576)

dlattn_family(forward sm90_latent ARCH 90a IN forward_sm90_latent_and_wide THEN combine)
dlattn_instance(forward sm90_latent float16 576)
dlattn_instance(forward sm90_latent bfloat16 576)
dlattn_instance(forward sm90_latent float8_e4m3fn 576)  # of k and v, beside q of either

dlattn_family(forward sm90_wide ARCH 90a IN forward_sm90_latent_and_wide)
dlattn_instance(forward sm90_wide float16 320 384 512)
dlattn_instance(forward sm90_wide bfloat16 320 384 512)

dlattn_family(forward sm90_fp8 ARCH 90a)
dlattn_instance(forward sm90_fp8 float8_e4m3fn 64 128 192 256)

dlattn_family(forward wmma8)
dlattn_instance(forward wmma8 float8_e4m3fn 64 128 256)
dlattn_instance(forward wmma8 int8 64 128 256 IN forward_wmma8_int8)

dlattn_family(forward wmma_halves)
dlattn_instance(forward wmma_halves float16 512)
dlattn_instance(forward wmma_halves bfloat16 512)

dlattn_family(forward wmma_smem IN forward_wmma_qk_and_smem)
dlattn_instance(forward wmma_smem float16 32 64 96 128)
dlattn_instance(forward wmma_smem bfloat16 32 64 96 128)

dlattn_family(forward wmma_qk IN forward_wmma_qk_and_smem)
dlattn_instance(forward wmma_qk float16 32 64 96 128)
dlattn_instance(forward wmma_qk bfloat16 32 64 96 128)

dlattn_family(forward scalar)
dlattn_instance(forward scalar float16 64 128 256)
dlattn_instance(forward scalar bfloat16 64 128 256)
dlattn_instance(forward scalar float32 64 128 256)
dlattn_instance(forward scalar float8_e4m3fn 64 128 256 IN forward_scalar_8_bit)  # of k and v, beside q of 16 bits
dlattn_instance(forward scalar int8 64 128 256 IN forward_scalar_8_bit)  # the same kernels

dlattn_family(merge row_per_warp IN small_operations)
dlattn_instance(merge row_per_warp float16 0)
dlattn_instance(merge row_per_warp bfloat16 0)
dlattn_instance(merge row_per_warp float32 0)

dlattn_family(quantize key_blocks)
dlattn_instance(quantize key_blocks int8 64 128 256)
dlattn_instance(quantize key_blocks float8_e4m3fn 64 128 256)

dlattn_family(append token_rows IN small_operations)
dlattn_instance(append token_rows float16 0)
dlattn_instance(append token_rows bfloat16 0)
dlattn_instance(append token_rows float32 0)

dlattn_family(backward sm90 ARCH 90a)
dlattn_instance(backward sm90 float16 64 128 256)
dlattn_instance(backward sm90 bfloat16 64 128 256)

dlattn_family(backward wmma)
dlattn_instance(backward wmma float16 64 128 256)
dlattn_instance(backward wmma bfloat16 64 128 256)

dlattn_family(backward scalar)
dlattn_instance(backward scalar float16 128 256)  # the same kernels for all dtypes
dlattn_instance(backward scalar bfloat16 128 256)
dlattn_instance(backward scalar float32 128 256)

dlattn_family(delta row_blocks IN small_operations WITHOUT_PLAN)
dlattn_instance(delta row_blocks float16 0)
dlattn_instance(delta row_blocks bfloat16 0)
dlattn_instance(delta row_blocks float32 0)

dlattn_family(reduce partial_sums IN small_operations WITHOUT_PLAN)
dlattn_instance(reduce partial_sums float32 0)
