//go:build !race

package apiservertest

// Instrumented reports whether the tests run with the race detector.
const Instrumented = false
