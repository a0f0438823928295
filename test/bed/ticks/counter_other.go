//go:build !amd64

package ticks

func counter() uint64 { return 0 }
