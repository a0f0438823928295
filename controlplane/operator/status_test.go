package operator

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"testing"

	"keelson.dev/keelson/controlplane/api"
)

// A replica that was ready at the last probe and does not answer the status request is listed as
// not ready, with the reason.
func TestStatusOfSilentMembers(t *testing.T) {
	refused := &url.Error{Op: "Get", URL: "https://192.0.2.11:6443/cluster/status",
		Err: errors.New("connection refused")}
	late := &url.Error{Op: "Get", URL: "https://192.0.2.12:6443/cluster/status",
		Err: fmt.Errorf("waiting: %w", context.DeadlineExceeded)}
	s := api.ClusterStatus{}
	for _, name := range []string{"cp1", "cp2", "cp3", "cp4"} {
		s.Members = append(s.Members, api.ClusterMember{Name: name, Ready: "yes", Contact: -1})
	}
	s.Members[2].Ready = "no: it has not been probed yet"
	newReport := func(name, ready string) *api.ClusterStatus {
		return &api.ClusterStatus{Answered: name, CommitIndex: 7,
			Members: []api.ClusterMember{{Name: name, Ready: ready, Applied: 6}}}
	}
	addReports(&s, []*api.ClusterStatus{nil, nil, newReport("cp3", "yes"), newReport("cp4", "no: starting")},
		[]error{refused, late, nil, nil})
	for i, want := range []string{"no: it does not answer: connection refused",
		"no: it does not answer: no answer within 1s", "yes", "no: starting"} {
		if got := s.Members[i].Ready; got != want {
			t.Errorf("the readiness of %s is %q, want %q", s.Members[i].Name, got, want)
		}
	}
	if s.CommitIndex != 7 || s.Members[2].Applied != 6 || s.Members[2].Contact != 0 {
		t.Errorf("the status with the report of cp3 has commit index %d and member %+v", s.CommitIndex, s.Members[2])
	}
}
