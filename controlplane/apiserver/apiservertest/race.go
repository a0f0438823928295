//go:build race

package apiservertest

// Instrumented reports whether the tests run with the race detector. With it, more memory is
// allocated, because it copies strings that are shared otherwise.
const Instrumented = true
