// Package keelson is the root of the module; it holds the import law as a test.
// See ARCHITECTURE.md for the rooms of the house.
package keelson
