// Package keelson is the root of the module; its tests check the import law and other rules of the
// whole tree. ARCHITECTURE.md is the map of the code.
package keelson
