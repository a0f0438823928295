//go:build !amd64

package tscrate

func counter() uint64 { return 0 }
