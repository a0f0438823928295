package kctl

import (
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/api"
)

// Replicas are listed by name, whatever the order in which they became voters.
func TestMembersAreListedByName(t *testing.T) {
	var out strings.Builder
	if err := printMembers(&out, []api.ClusterMember{{Name: "cp1"}, {Name: "cp3"}, {Name: "cp2"}}); err != nil {
		t.Fatal(err)
	}
	var names []string
	for line := range strings.Lines(out.String()) {
		names = append(names, strings.Fields(line)[0])
	}
	if got := strings.Join(names, " "); got != "REPLICA cp1 cp2 cp3" {
		t.Errorf("listed as %s", got)
	}
}
