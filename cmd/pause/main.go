// Command pause holds a pod's namespaces open and does nothing else.
//
// Linked with -ldflags '-E main.start' the process begins in start, a few lines
// of assembly, and the Go runtime is never set up: it costs 15 KiB instead of
// 500. Linked without, main does the same in Go.
package main

import (
	"os/signal"
	"syscall"
)

// start is the entry of the process when linked with -E main.start.
func start()

func main() {
	// As first process of a shared process namespace pause inherits orphans:
	// ignoring SIGCHLD lets the kernel reap them.
	signal.Ignore(syscall.SIGCHLD)
	for {
		_ = syscall.Pause()
	}
}
