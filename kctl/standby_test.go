package kctl

import (
	"bytes"
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/api"
)

// A status tells what is done about a dead replica, or why nothing is, and whose vote a standby has got.
func TestStatusTellsOfStandbys(t *testing.T) {
	s := newPlane().status
	s.Members[3].Standby = true
	s.Autopilot = &api.ClusterAutopilot{After: 600_000,
		State: "cp3 has not answered for 11m0s, and no standby is caught up: cp4 is 3,212 entries behind", Blocked: 1,
		Done: []api.ClusterReplaced{{Dead: "cp0", Standby: "cp2", At: 1_700_000_000_000}}}
	var out bytes.Buffer
	if err := printStatus(&out, s); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"autopilot  replaces a voter that has not answered for 10m0s; cp3 has not answered for 11m0s, and no standby " +
			"is caught up: cp4 is 3,212 entries behind\n",
		"cp2 has the vote of cp0 since " + formatTimestamp(1_700_000_000_000) + "\n",
		"cp4       standby    192.0.2.14:6445",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	s.Autopilot = nil
	out.Reset()
	if err := printStatus(&out, s); err != nil || strings.Contains(out.String(), "autopilot") {
		t.Errorf("autopilot is printed although it is disabled: %v\n%s", err, out.String())
	}
}
