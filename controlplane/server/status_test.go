package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/internal/virtual"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// A replica that was ready a moment ago and does not answer the status now is shown as not ready, with the reason.
func TestStatusOfWhoDoesNotAnswer(t *testing.T) {
	refused := &url.Error{Op: "Get", URL: "https://192.0.2.11:6443/cluster/status", Err: errors.New("connection refused")}
	late := &url.Error{Op: "Get", URL: "https://192.0.2.12:6443/cluster/status", Err: fmt.Errorf("waiting: %w", context.DeadlineExceeded)}
	s := api.ClusterStatus{}
	for _, name := range []string{"cp1", "cp2", "cp3", "cp4"} {
		s.Members = append(s.Members, api.ClusterMember{Name: name, Ready: "yes", Contact: -1})
	}
	s.Members[2].Ready = "no: it has not been asked yet"
	answers := func(name, ready string) *api.ClusterStatus {
		return &api.ClusterStatus{Answered: name, CommitIndex: 7, Members: []api.ClusterMember{{Name: name, Ready: ready, Applied: 6}}}
	}
	complete(&s, []*api.ClusterStatus{nil, nil, answers("cp3", "yes"), answers("cp4", "no: starting")}, []error{refused, late, nil, nil})
	for i, want := range []string{"no: it does not answer: connection refused", "no: it does not answer: nothing came within 1s", "yes", "no: starting"} {
		if got := s.Members[i].Ready; got != want {
			t.Errorf("%s: %q, want %q", s.Members[i].Name, got, want)
		}
	}
	if s.CommitIndex != 7 || s.Members[2].Applied != 6 || s.Members[2].Contact != 0 {
		t.Errorf("what cp3 says of itself: %+v", s.Members[2])
	}
}

// When a replica was heard last is remembered after it has fallen silent.
func TestHeardOf(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		r := newReplicas("cp1", datadir.Cluster{}, nil, func() *tls.Config { return new(tls.Config) }, slog.New(slog.NewTextHandler(io.Discard, nil)))
		list := []*fleetv1.Replica{{Name: "cp2"}, {Name: "cp3"}}
		silent := errors.New("silent")
		r.learn(list, []error{nil, silent})
		heard := time.Now()
		time.Sleep(time.Minute)
		r.learn(list, []error{silent, silent})
		if got := r.heardOf("cp2"); !got.Equal(heard) {
			t.Errorf("cp2 was heard at %v, want %v", got, heard)
		}
		if got := r.heardOf("cp3"); !got.IsZero() {
			t.Errorf("cp3 was never heard, but at %v", got)
		}
	})
}
