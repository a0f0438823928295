// Command pause holds a pod's namespaces open and does nothing else.
//
// Linked with -ldflags '-E main.start', the process starts in the function start, a few lines of
// assembly, and the Go runtime is never initialized. It then uses 15 KiB of memory instead of 500
// KiB. If it is linked without this flag, main does the same in Go.
package main

import (
	"os/signal"
	"syscall"
)

// start is the entry point of the process if it is linked with -E main.start.
func start()

func main() {
	// As the first process of a shared PID namespace, pause inherits orphans. Ignoring SIGCHLD
	// makes the kernel reap them.
	signal.Ignore(syscall.SIGCHLD)
	for {
		_ = syscall.Pause()
	}
}
