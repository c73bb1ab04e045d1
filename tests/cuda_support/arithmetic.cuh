// Included by the kernels of the tests, to show that a program finds the headers of its package.
#pragma once

constexpr int doubled(int x) { return 2 * x; }
