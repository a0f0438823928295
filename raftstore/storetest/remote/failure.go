package remote

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
)

// kinds lists the errors that are preserved over gRPC, with their encoding and status code. If an
// error wraps several of them, the first in this list determines the status code.
var kinds = []struct {
	kind storev1.RemoteFailure_Kind
	code codes.Code
	err  error
}{
	{storev1.RemoteFailure_OUTCOME_UNKNOWN, codes.Unknown, raftstore.ErrOutcomeUnknown},
	{storev1.RemoteFailure_INVALID, codes.InvalidArgument, raftstore.ErrInvalid},
	{storev1.RemoteFailure_TOO_LARGE, codes.InvalidArgument, raftstore.ErrTooLarge},
	{storev1.RemoteFailure_NOT_FOUND, codes.NotFound, raftstore.ErrNotFound},
	{storev1.RemoteFailure_SLOW_WATCHER, codes.OutOfRange, raftstore.ErrSlowWatcher},
	{storev1.RemoteFailure_COMPACTED, codes.OutOfRange, raftstore.ErrCompacted},
	{storev1.RemoteFailure_FUTURE_REVISION, codes.OutOfRange, raftstore.ErrFutureRevision},
	{storev1.RemoteFailure_FENCED, codes.Aborted, raftstore.ErrFenced},
	{storev1.RemoteFailure_NO_SPACE, codes.ResourceExhausted, raftstore.ErrNoSpace},
	{storev1.RemoteFailure_UNKNOWN_MEMBER, codes.NotFound, raftstore.ErrUnknownMember},
	{storev1.RemoteFailure_MEMBER_EXISTS, codes.AlreadyExists, raftstore.ErrMemberExists},
	{storev1.RemoteFailure_TOO_OLD, codes.FailedPrecondition, raftstore.ErrTooOld},
	{storev1.RemoteFailure_NO_MAJORITY, codes.FailedPrecondition, raftstore.ErrNoMajority},
	{storev1.RemoteFailure_TRANSFER_FAILED, codes.Aborted, raftstore.ErrTransferFailed},
	{storev1.RemoteFailure_NOT_LEADER, codes.FailedPrecondition, raftstore.ErrNotLeader},
	{storev1.RemoteFailure_UNAVAILABLE, codes.Unavailable, raftstore.ErrUnavailable},
	{storev1.RemoteFailure_CLOSED, codes.Unavailable, raftstore.ErrClosed},
	{storev1.RemoteFailure_DEADLINE, codes.DeadlineExceeded, context.DeadlineExceeded},
	{storev1.RemoteFailure_CANCELLED, codes.Canceled, context.Canceled},
}

// StatusOf converts an error of the store to a gRPC status with details that list every raftstore
// error it wraps. Err reverses it. The result for nil is nil.
func StatusOf(err error) error {
	if err == nil {
		return nil
	}
	code, failure := codes.Unknown, new(storev1.RemoteFailure)
	for _, k := range kinds {
		if !errors.Is(err, k.err) {
			continue
		}
		if len(failure.Kinds) == 0 {
			code = k.code
		}
		failure.Kinds = append(failure.Kinds, k.kind)
	}
	// A message may quote arbitrary bytes; a status must be valid UTF-8.
	s := status.New(code, strings.ToValidUTF8(err.Error(), "\uFFFD"))
	if with, failed := s.WithDetails(failure); failed == nil {
		s = with
	}
	return s.Err()
}

// failure is an error of the replica that was received over gRPC: its message and the raftstore
// errors that it wraps.
type failure struct {
	message string
	wraps   []error
}

func (f *failure) Error() string   { return f.message }
func (f *failure) Unwrap() []error { return f.wraps }

// errLost means that the connection to the replica failed before the replica responded.
var errLost = errors.New("remote: connection to the replica is lost")

// Err converts the error of a gRPC call. It returns the error of the replica if StatusOf has
// encoded one, and otherwise ErrUnavailable with the reason. The result for a status OK is nil.
func Err(err error) error {
	s := status.Convert(err)
	for _, d := range s.Details() {
		if f, ok := d.(*storev1.RemoteFailure); ok {
			return &failure{message: s.Message(), wraps: namedErrors(f.GetKinds())}
		}
	}
	switch s.Code() {
	case codes.OK:
		return nil
	case codes.DeadlineExceeded:
		return fmt.Errorf("%w: %w", raftstore.ErrUnavailable, context.DeadlineExceeded)
	case codes.Canceled:
		return fmt.Errorf("%w: %w", raftstore.ErrUnavailable, context.Canceled)
	case codes.InvalidArgument:
		return fmt.Errorf("%w: %s", raftstore.ErrInvalid, s.Message())
	}
	if s.Code() == codes.Unavailable || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("%w: %w: %w", raftstore.ErrUnavailable, errLost, err)
	}
	return fmt.Errorf("%w: %w", raftstore.ErrUnavailable, err)
}

func namedErrors(in []storev1.RemoteFailure_Kind) []error {
	var out []error
	for _, n := range in {
		for _, k := range kinds {
			if k.kind == n {
				out = append(out, k.err)
			}
		}
	}
	return out
}
