package membership

import (
	"slices"
	"testing"

	"keelson.dev/keelson/controlplane/api"
)

// A removed replica is reported until each key that it had is rotated. The secret of the cluster
// cannot be rotated. F51
func TestRemovedMemberIsReportedUntilRotation(t *testing.T) {
	had := []api.ClusterKeyHeld{{Kind: "cluster-ca", Signs: "a", Believes: []string{"a"}},
		{Kind: "service-account-key", Signs: "s", Believes: []string{"s", "s2"}}}
	removed := removedMember{Name: "cp3", KeyIDs: keyIDsByKind(had)}
	withoutSecret := removed // an entry of a release that does not record the secret
	secret := func(id string) api.ClusterKeyHeld { return api.ClusterKeyHeld{Kind: "cluster-secret", Signs: id} }
	withSecret := removedMember{Name: "cp3", KeyIDs: keyIDsByKind(append(slices.Clone(had), secret("x")))}
	for _, c := range []struct {
		removed removedMember
		current []api.ClusterKeyHeld
		want    []string
	}{
		{removed, had, []string{"cluster-ca", "service-account-key"}},
		{removed, []api.ClusterKeyHeld{{Kind: "cluster-ca", Signs: "b", Believes: []string{"b", "a"}},
			{Kind: "service-account-key", Signs: "t"}}, []string{"cluster-ca"}},
		{removed, []api.ClusterKeyHeld{{Kind: "cluster-ca", Signs: "b", Believes: []string{"b"}},
			{Kind: "service-account-key", Signs: "t", Believes: []string{"t", "s2"}}}, []string{"service-account-key"}},
		{removed, []api.ClusterKeyHeld{{Kind: "cluster-ca", Signs: "b", Believes: []string{"b"}},
			{Kind: "peers-ca", Signs: "a"}}, nil},
		{withSecret, []api.ClusterKeyHeld{{Kind: "cluster-ca", Signs: "b"}, secret("x")}, []string{"cluster-secret"}},
		{withoutSecret, []api.ClusterKeyHeld{{Kind: "cluster-ca", Signs: "b"}, secret("x")},
			[]string{"cluster-secret"}},
		// another cluster that has restored a backup of this cluster
		{withSecret, []api.ClusterKeyHeld{{Kind: "cluster-ca", Signs: "b"}, secret("y")}, nil},
	} {
		if got := validKeyKinds(c.removed, c.current); !slices.Equal(got, c.want) {
			t.Errorf("the valid kinds of keys among %+v are %q, want %q", c.current, got, c.want)
		}
	}
}
