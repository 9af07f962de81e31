#pragma once

// Parts of the short suite. What there is to read begins and ends where its allocation does, and
// lists of caches hold garbage wherever nobody should look, or where it counts as nothing.
namespace test {

void run_decode();
void run_append();
void run_backward();

}  // namespace test
