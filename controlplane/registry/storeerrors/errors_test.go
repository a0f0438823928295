package storeerrors

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

func TestToStatus(t *testing.T) {
	for _, c := range []struct {
		name   string
		err    error
		code   int32
		reason metav1.StatusReason
	}{
		{"unknown outcome", raftstore.ErrOutcomeUnknown, http.StatusGatewayTimeout, metav1.StatusReasonTimeout},
		{"deadline", context.DeadlineExceeded, http.StatusGatewayTimeout, metav1.StatusReasonTimeout},
		{"canceled", context.Canceled, http.StatusGatewayTimeout, metav1.StatusReasonTimeout},
		{"fenced", raftstore.ErrFenced, http.StatusConflict, ReasonLeadershipEnded},
		{"no leader", raftstore.ErrNotLeader, http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable},
		{"unavailable", raftstore.ErrUnavailable, http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable},
		{"too large", raftstore.ErrTooLarge, http.StatusRequestEntityTooLarge,
			metav1.StatusReasonRequestEntityTooLarge},
		{"no space", raftstore.ErrNoSpace, http.StatusInsufficientStorage, "InsufficientStorage"},
		{"compacted", raftstore.ErrCompacted, http.StatusGone, metav1.StatusReasonExpired},
		{"a status", NewNotServed(), http.StatusNotFound, metav1.StatusReasonNotFound},
		{"another error", errors.New("disk"), http.StatusInternalServerError, metav1.StatusReasonInternalError},
	} {
		status := StatusOf(ToStatus(fmt.Errorf("committing: %w", c.err), "create pods a"))
		if status.Code != c.code || status.Reason != c.reason {
			t.Errorf("%s: %d %s, want %d %s", c.name, status.Code, status.Reason, c.code, c.reason)
		}
	}
	if ToStatus(nil, "create pods a") != nil {
		t.Error("no error becomes a status")
	}
	if err := ToStatus(raftstore.ErrFenced, "create pods a"); !IsLeadershipEnded(err) ||
		IsLeadershipEnded(errors.New("other")) {
		t.Errorf("IsLeadershipEnded does not match %v alone", err)
	}
	for _, err := range []error{NewNotServed(), NewKindReplaced(&api.Kind{Resource: "widgets"})} {
		if !errors.Is(err, api.ErrKindExchanged) {
			t.Errorf("%v does not match api.ErrKindExchanged", err)
		}
	}
}
