package criconfig

import (
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
)

// A container gets the devices of the claims that it references, or of a single request, without
// duplicates.
func TestDevicesOfContainers(t *testing.T) {
	all := agent.ClaimedDevices{
		"gpu": {{Requests: []string{"big"}, CDI: []string{"v/c=1", "v/c=both"}},
			{Requests: []string{"small/cheap"}, CDI: []string{"v/c=2", "v/c=both"}}},
		"nic": {{CDI: []string{"v/n=1"}}},
	}
	for want, uses := range map[string][]v1.ResourceClaim{
		"":                           nil,
		"v/c=1 v/c=both v/c=2":       {{Name: "gpu"}},
		"v/c=1 v/c=both":             {{Name: "gpu", Request: "big"}},
		"v/c=2 v/c=both":             {{Name: "gpu", Request: "small"}},
		"v/n=1":                      {{Name: "nic", Request: "any"}},
		"v/n=1 v/c=1 v/c=both v/c=2": {{Name: "nic"}, {Name: "gpu"}},
		"v/c=2 v/c=both v/n=1":       {{Name: "gpu", Request: "small"}, {Name: "nic"}, {Name: "none"}},
	} {
		var got []string
		for _, d := range ClaimedDevices(&v1.Container{Resources: v1.ResourceRequirements{Claims: uses}}, all) {
			got = append(got, d.Name)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%v: %v, want %s", uses, got, want)
		}
	}
}
