// Package storeerrors converts errors of the store, and timeouts of waits for the store, to API
// statuses.
package storeerrors

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/raftstore"
)

// ReasonLeadershipEnded is the reason of the 409 for a fenced write (valid only in one raft term)
// after the end of that term. Retries in the same term fail too.
const ReasonLeadershipEnded metav1.StatusReason = "LeadershipEnded"

// IsLeadershipEnded reports whether err is the rejection of a fenced write because the raft term
// for which it was valid has ended.
func IsLeadershipEnded(err error) bool {
	var s *apierrors.StatusError
	return errors.As(err, &s) && s.ErrStatus.Reason == ReasonLeadershipEnded
}

// ToStatus converts an error of the store, or of a wait for the store, to an API status. It returns
// API statuses unchanged. operation describes the request and its object, for the message.
func ToStatus(err error, operation string) error {
	var status apierrors.APIStatus
	switch {
	case err == nil:
		return nil
	case errors.As(err, &status):
		return err
	case errors.Is(err, raftstore.ErrOutcomeUnknown):
		return apierrors.NewTimeoutError(operation+
			": the store did not confirm the change in time; the change may or may not have been made", 1)
	case errors.Is(err, context.DeadlineExceeded):
		return apierrors.NewTimeoutError(operation+": the store did not answer in time", 1)
	case errors.Is(err, context.Canceled):
		return apierrors.NewTimeoutError(operation+": the request was canceled", 0)
	case errors.Is(err, raftstore.ErrFenced):
		return NewStatus(http.StatusConflict, ReasonLeadershipEnded,
			operation+": the leadership under which the change was decided has ended", 0)
	case errors.Is(err, raftstore.ErrUnavailable), errors.Is(err, raftstore.ErrNotLeader),
		errors.Is(err, raftstore.ErrClosed):
		return NewStatus(http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable,
			operation+": the store has no leader", 1)
	case errors.Is(err, raftstore.ErrTooLarge):
		return apierrors.NewRequestEntityTooLargeError(fmt.Sprintf("%s: %v", operation, err))
	case errors.Is(err, raftstore.ErrNoSpace):
		return NewStatus(http.StatusInsufficientStorage, "InsufficientStorage",
			operation+": the store's quota is used up: it accepts only deletions and small changes of existing "+
				"objects; 'kctl cluster status' shows what to do", 0)
	case errors.Is(err, raftstore.ErrCompacted):
		return &apierrors.StatusError{ErrStatus: *NewExpired(operation + ": the requested revision is no longer kept")}
	default:
		return apierrors.NewInternalError(fmt.Errorf("%s: %w", operation, err))
	}
}

// NewStatus returns a status error with the given code, reason and message. retryAfter is the value
// of Retry-After in seconds; 0 means that the response has no Retry-After.
func NewStatus(code int32, reason metav1.StatusReason, message string, retryAfter int32) *apierrors.StatusError {
	s := metav1.Status{Status: metav1.StatusFailure, Code: code, Reason: reason, Message: message}
	if retryAfter > 0 {
		s.Details = &metav1.StatusDetails{RetryAfterSeconds: retryAfter}
	}
	return &apierrors.StatusError{ErrStatus: s}
}

// StatusOf returns the Status of an error from ToStatus.
func StatusOf(err error) *metav1.Status {
	var s apierrors.APIStatus
	if !errors.As(err, &s) {
		s = apierrors.NewInternalError(err)
	}
	status := s.Status()
	return &status
}

// NewNotServed returns a 404 for a kind that is not served: its definition was deleted or
// recreated. The error matches api.ErrKindExchanged, so the API server retries the request with the
// newest definition, if such a definition exists.
func NewNotServed() error {
	return &exchangedError{NewStatus(http.StatusNotFound, metav1.StatusReasonNotFound,
		"the server could not find the requested resource", 0)}
}

// NewKindReplaced returns the error for a kind that was replaced by another kind of the same name,
// because its definition changed. The error matches api.ErrKindExchanged, so that the API server
// retries the request. Other callers get a 503, which client libraries retry.
func NewKindReplaced(kind *api.Kind) error {
	return &exchangedError{NewStatus(http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable,
		fmt.Sprintf("the definition of %s has changed during the request: try again", kind.GroupResource()), 1)}
}

// exchangedError is a status error that also matches api.ErrKindExchanged.
type exchangedError struct{ *apierrors.StatusError }

func (e *exchangedError) Unwrap() error        { return e.StatusError }
func (e *exchangedError) Is(target error) bool { return target == api.ErrKindExchanged }

// ErrModified is the reason of a conflict with another write of the same object. It has the message
// of Kubernetes.
var ErrModified = errors.New("the object has been modified; please apply your changes to the latest " +
	"version and try again")

// NewModifiedConflict returns the 409 for a write that is based on an older state of the object.
func NewModifiedConflict(gr schema.GroupResource, name string) error {
	return apierrors.NewConflict(gr, name, ErrModified)
}

// NewExpired returns the status 410 with the reason Expired, which makes a client list again.
func NewExpired(message string) *metav1.Status {
	err := apierrors.NewResourceExpired(message)
	status := err.Status()
	status.Code = http.StatusGone
	return &status
}

// DescribeRequest returns the verb, resource and object of a request as text for error messages.
func DescribeRequest(req *api.Request) string {
	s := string(req.Verb) + " " + req.Kind.Resource
	if req.Subresource != "" {
		s += "/" + req.Subresource
	}
	if key := storedform.ObjectKey(req.Kind, req.Namespace, req.Name); key != "/" && key != "" {
		s += " " + key
	}
	return s
}
