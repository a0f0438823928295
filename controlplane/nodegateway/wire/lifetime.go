// Package wire contains what all parts of the node gateway share about the fleet protocol: the
// encoding of objects, limits of messages, errors that end a stream, and the lifetime of streams.
package wire

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// MaxMessage is the maximum size of a message to an agent. It is larger than the largest object
	// with its envelope.
	MaxMessage = 16 << 20
	// MaxOutbox is the maximum number of queued messages on one stream to an agent that does not
	// receive.
	MaxOutbox = 4096
	// firstMessageTimeout is the timeout for the first message of a stream, which agents send
	// immediately.
	firstMessageTimeout = 10 * time.Second
)

// ErrSlowAgent ends a stream on which more than MaxOutbox messages are queued.
var ErrSlowAgent = status.Error(codes.ResourceExhausted,
	"fleet: the agent does not read the messages that it requested")

// RevokedError returns the error for a caller whose certificate of this node is revoked.
func RevokedError(node string) error {
	return status.Errorf(codes.PermissionDenied,
		"fleet: the certificate of node %s was revoked: enroll it again with a token of "+
			"'kctl cluster token create --names %s --replace'", node, node)
}

// StreamError returns the gRPC status error with which a stream ends because of err: nil for a
// regular end, and Internal for errors without a gRPC code.
func StreamError(err error) error {
	if err == nil || errors.Is(err, context.Canceled) || errors.Is(err, io.EOF) {
		return nil
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	return status.Error(codes.Internal, err.Error())
}

// Lifetime ends the streams of agents when the replica stops, and waits for their goroutines. Its
// methods are safe for concurrent use. Create it with NewLifetime.
type Lifetime struct {
	Replica string // name of the replica

	stopping chan struct{}
	stop     sync.Once
	children sync.WaitGroup
}

// NewLifetime returns the Lifetime of the streams of the replica with this name.
func NewLifetime(replica string) *Lifetime {
	return &Lifetime{Replica: replica, stopping: make(chan struct{})}
}

// Go calls f in a goroutine, for which Wait waits.
func (l *Lifetime) Go(f func()) { l.children.Go(f) }

// Wait blocks until all goroutines that Go has started have returned.
func (l *Lifetime) Wait() { l.children.Wait() }

// Stop makes all streams end. It may be called more than once.
func (l *Lifetime) Stop() { l.stop.Do(func() { close(l.stopping) }) }

// Stopping returns a channel that is closed when the replica stops.
func (l *Lifetime) Stopping() <-chan struct{} { return l.stopping }

// StoppingError returns the error for a stream that ends because the replica stops.
func (l *Lifetime) StoppingError() error {
	return status.Errorf(codes.Unavailable, "fleet: replica %s is stopping", l.Replica)
}

// ReceiveFirst returns the first message of a stream. It returns a DeadlineExceeded error after
// firstMessageTimeout.
func ReceiveFirst[M any](l *Lifetime, stream interface{ Recv() (M, error) }) (M, error) {
	type message struct {
		m   M
		err error
	}
	received := make(chan message, 1)
	l.Go(func() { // returns when the stream ends
		m, err := stream.Recv()
		received <- message{m, err}
	})
	timeout := time.NewTimer(firstMessageTimeout)
	defer timeout.Stop()
	select {
	case first := <-received:
		return first.m, first.err
	case <-timeout.C:
		var none M
		return none, status.Errorf(codes.DeadlineExceeded, "fleet: the first message did not arrive within %s",
			firstMessageTimeout)
	}
}
