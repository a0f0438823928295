// Package keelson is the root of the module; it holds the import law as a test.
// ARCHITECTURE.md is the map of the code.
package keelson
