package registry

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

// ReasonLeadershipEnded is the reason of the 409 for a fenced write after the end of the leadership
// that decided it. Retries under the same leadership fail too.
const ReasonLeadershipEnded metav1.StatusReason = "LeadershipEnded"

// IsLeadershipEnded reports whether a write was rejected because its leadership has ended.
func IsLeadershipEnded(err error) bool {
	var s *apierrors.StatusError
	return errors.As(err, &s) && s.ErrStatus.Reason == ReasonLeadershipEnded
}

// statusError converts an error of the store, or of a wait for it, to an API status. doing
// describes the operation and its object, for the message.
func statusError(err error, doing string) error {
	var status apierrors.APIStatus
	switch {
	case err == nil:
		return nil
	case errors.As(err, &status):
		return err
	case errors.Is(err, raftstore.ErrOutcomeUnknown):
		return apierrors.NewTimeoutError(doing+": the store did not confirm the change in time; whether it was made is unknown", 1)
	case errors.Is(err, context.DeadlineExceeded):
		return apierrors.NewTimeoutError(doing+": the store did not answer in time", 1)
	case errors.Is(err, context.Canceled):
		return apierrors.NewTimeoutError(doing+": the caller gave up", 0)
	case errors.Is(err, raftstore.ErrFenced):
		return newStatus(http.StatusConflict, ReasonLeadershipEnded, doing+": the leadership that decided this has ended", 0)
	case errors.Is(err, raftstore.ErrUnavailable), errors.Is(err, raftstore.ErrNotLeader), errors.Is(err, raftstore.ErrClosed):
		return newStatus(http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable, doing+": the store has no leader", 1)
	case errors.Is(err, raftstore.ErrTooLarge):
		return apierrors.NewRequestEntityTooLargeError(fmt.Sprintf("%s: %v", doing, err))
	case errors.Is(err, raftstore.ErrNoSpace):
		return newStatus(http.StatusInsufficientStorage, "InsufficientStorage",
			doing+": the store's quota is used up: it takes deletions and small changes of what is there, nothing new; 'kctl cluster status' says what to do", 0)
	case errors.Is(err, raftstore.ErrCompacted):
		return &apierrors.StatusError{ErrStatus: *expired(doing + ": the requested revision is no longer kept")}
	default:
		return apierrors.NewInternalError(fmt.Errorf("%s: %w", doing, err))
	}
}

func newStatus(code int32, reason metav1.StatusReason, message string, retryAfter int32) *apierrors.StatusError {
	s := metav1.Status{Status: metav1.StatusFailure, Code: code, Reason: reason, Message: message}
	if retryAfter > 0 {
		s.Details = &metav1.StatusDetails{RetryAfterSeconds: retryAfter}
	}
	return &apierrors.StatusError{ErrStatus: s}
}

// statusOf returns the Status of an error from statusError.
func statusOf(err error) *metav1.Status {
	var s apierrors.APIStatus
	if !errors.As(err, &s) {
		s = apierrors.NewInternalError(err)
	}
	status := s.Status()
	return &status
}

// notServed returns a 404 for a kind that is not served: its definition was deleted or recreated.
// The error matches api.ErrKindExchanged, so that the API retries the request with the newest
// definition, if there is one.
func notServed() error {
	return &exchanged{newStatus(http.StatusNotFound, metav1.StatusReasonNotFound, "the server could not find the requested resource", 0)}
}

// notServed returns the error for a kind that is not served any more. If another kind with the same
// name is served, because its definition changed, a retry succeeds. The API retries by itself
// (api.ErrKindExchanged). Other callers get a 503, which client libraries retry.
func (r *Registry) notServed(k *api.Kind) error {
	if now := r.kinds.ByGVK(k.GVK); now == nil || now == k {
		return notServed()
	}
	return &exchanged{newStatus(http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable,
		fmt.Sprintf("the definition of %s has changed while this was being answered: ask again", k.GroupResource()), 1)}
}

// exchanged is a status error that also matches api.ErrKindExchanged.
type exchanged struct{ *apierrors.StatusError }

func (e *exchanged) Unwrap() error        { return e.StatusError }
func (e *exchanged) Is(target error) bool { return target == api.ErrKindExchanged }

var errModified = errors.New("the object has been modified; please apply your changes to the latest version and try again")

func modifiedConflict(gr schema.GroupResource, name string) error {
	return apierrors.NewConflict(gr, name, errModified)
}
