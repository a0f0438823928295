package kctl

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// interruption is the error of a command that a signal has ended.
type interruption struct{ signal syscall.Signal }

// Error implements error.
func (i *interruption) Error() string { return fmt.Sprintf("stopped by a signal (%s)", i.signal) }

// code is the exit code by which shells know a command that a signal has ended.
func (i *interruption) code() int { return 128 + int(i.signal) }

// interruptible is a context that ends on SIGINT and SIGTERM, and on others that
// are named, with an *interruption as its cause. A second signal has its usual
// effect, in case the first leads to nothing.
func interruptible(others ...os.Signal) (context.Context, context.CancelFunc) {
	caught := make(chan os.Signal, 1)
	ctx, end := context.WithCancelCause(context.Background())
	for _, s := range append(others, os.Interrupt, syscall.SIGTERM) {
		if s != syscall.SIGHUP || !signal.Ignored(s) { // nohup has the last word
			signal.Notify(caught, s)
		}
	}
	go func() {
		select {
		case s := <-caught:
			signal.Stop(caught)
			number, _ := s.(syscall.Signal)
			end(&interruption{number})
		case <-ctx.Done():
			signal.Stop(caught)
		}
	}()
	return ctx, func() { end(nil) }
}
