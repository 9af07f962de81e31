#pragma once

#include <climits>
#include <string>
#include <vector>

#include "attention_case.h"

namespace simt {

// Varlen batches whose cu_seqlens and seqused_k are not what they should be, and slices of larger
// batches, which are fine: both for every family that serves variable length. A GPU's host cannot
// look at them, so whatever they hold must not lead a kernel out of its tensors.
namespace lengths {

constexpr int kRowsQ = 150, kRowsK = 170;  // of the tensors

Case varlen_of(Case c, const std::string& what, std::vector<int> cu_seqlens_q,
               std::vector<int> cu_seqlens_k);

}  // namespace lengths

// Slices: rows before the first sequence and after the last one, of q and of k apart.
std::vector<Case> slice_cases(const Case& base);

std::vector<Case> hostile_length_cases(const Case& base);

// Rows of more keys than are added up in one run, beside shorter ones, where maxima rise within a
// run, from one to the next, or not at all; rows that see nothing of the first runs, or nothing.
std::vector<Case> run_cases(int head_dim);

// Both, without bias, mask and ALiBi.
std::vector<Case> length_cases(int head_dim);

// With bias, mask and ALiBi of each sequence, which are as large as the longest sequence.
std::vector<Case> length_and_score_cases(int head_dim);

}  // namespace simt
