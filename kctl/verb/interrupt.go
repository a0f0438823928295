package verb

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// Interruption is the error of a command that was stopped by a signal.
type Interruption struct{ signal syscall.Signal }

// Error returns a text with the name of the signal.
func (i *Interruption) Error() string { return fmt.Sprintf("stopped by a signal (%s)", i.signal) }

// ExitCode returns 128 plus the number of the signal, as shells do for a process that a signal
// ends.
func (i *Interruption) ExitCode() int { return 128 + int(i.signal) }

// WithSignals returns a context that is canceled on SIGINT, SIGTERM and the signals in others, with
// an *Interruption as its cause. A second signal has its default effect, so that the process can
// always be ended.
func WithSignals(others ...os.Signal) (context.Context, context.CancelFunc) {
	caught := make(chan os.Signal, 1)
	ctx, end := context.WithCancelCause(context.Background())
	for _, s := range append(others, os.Interrupt, syscall.SIGTERM) {
		if s != syscall.SIGHUP || !signal.Ignored(s) { // a SIGHUP that nohup ignores stays ignored
			signal.Notify(caught, s)
		}
	}
	go func() {
		select {
		case s := <-caught:
			signal.Stop(caught)
			number, _ := s.(syscall.Signal)
			end(&Interruption{number})
		case <-ctx.Done():
			signal.Stop(caught)
		}
	}()
	return ctx, func() { end(nil) }
}
