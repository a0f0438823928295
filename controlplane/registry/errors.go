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

// ReasonLeadershipEnded is the reason of the 409 that a fenced write gets when
// the leadership that decided it has ended. It is final for that leadership.
const ReasonLeadershipEnded metav1.StatusReason = "LeadershipEnded"

// IsLeadershipEnded says that a write was refused because its leadership is over.
func IsLeadershipEnded(err error) bool {
	var s *apierrors.StatusError
	return errors.As(err, &s) && s.ErrStatus.Reason == ReasonLeadershipEnded
}

// statusError turns an error of the store, or of waiting for it, into an API
// status. doing says what was being done to which object.
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

// statusOf is the body of an error that statusError made.
func statusOf(err error) *metav1.Status {
	var s apierrors.APIStatus
	if !errors.As(err, &s) {
		s = apierrors.NewInternalError(err)
	}
	status := s.Status()
	return &status
}

// notServed returns the error for a kind that is not served, or whose definition no longer exists or was recreated. The API
// answers the request with the kind of the newest definition if there is one (api.ErrKindExchanged).
func notServed() error {
	return &exchanged{newStatus(http.StatusNotFound, metav1.StatusReasonNotFound, "the server could not find the requested resource", 0)}
}

// notServed is the answer about a kind that is not served any more. One that has been exchanged for another of its name,
// as when its definition changes, is there all the time: who asks again finds it. The API does that itself
// (api.ErrKindExchanged); to others it is a 503, after which client libraries ask again.
func (r *Registry) notServed(k *api.Kind) error {
	if now := r.kinds.ByGVK(k.GVK); now == nil || now == k {
		return notServed()
	}
	return &exchanged{newStatus(http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable,
		fmt.Sprintf("the definition of %s has changed while this was being answered: ask again", k.GroupResource()), 1)}
}

// exchanged is a status that is api.ErrKindExchanged besides.
type exchanged struct{ *apierrors.StatusError }

func (e *exchanged) Unwrap() error        { return e.StatusError }
func (e *exchanged) Is(target error) bool { return target == api.ErrKindExchanged }

var errModified = errors.New("the object has been modified; please apply your changes to the latest version and try again")

func modifiedConflict(gr schema.GroupResource, name string) error {
	return apierrors.NewConflict(gr, name, errModified)
}
