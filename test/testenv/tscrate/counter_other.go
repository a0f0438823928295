//go:build !amd64

package tscrate

func readCounter() uint64 { return 0 }
