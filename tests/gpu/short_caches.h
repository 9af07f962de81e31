#pragma once

// Keys in caches, as a part of the short suite: what there is to read begins and ends where its
// allocation does, and lists hold garbage wherever nobody should look, or where it counts as
// nothing.
namespace test {

void run_decode();
void run_append();

}  // namespace test
