package provision

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Replicas that run are not restarted one after the other where the cluster only seems to stand still; those that do not run are started.
func TestClusterThatDoesNotAnswer(t *testing.T) {
	s := newSite(t)
	names := []string{"cp1", "cp2", "cp3"}
	hosts := []string{"cp1 192.0.2.11 controlplane", "cp2 192.0.2.12 controlplane", "cp3 192.0.2.13 controlplane"}
	s.write("", hosts...)
	if said, err := s.kctl("up"); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	of := func(name string, at ...string) string {
		return filepath.Join(append([]string{s.all[name].root}, at...)...)
	}
	remove := func(path string) {
		t.Helper()
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	starts := func(want ...int) map[string]int {
		out := map[string]int{}
		for i, n := range want {
			out[names[i]+" keelson-controlplane"] = n
		}
		return out
	}
	s.write("controlplane: {debug: true}\n", hosts...)
	for _, name := range names {
		put(t, of(name, "locked-out"), "", 0o600)
	}
	const refused = "cp1 is not restarted: enough replicas run for the cluster to answer, and it does not"
	said, err := s.kctl("up")
	if is := s.cluster().Starts; err == nil || !strings.Contains(err.Error(), refused) ||
		!strings.Contains(err.Error(), "Unauthorized") || !maps.Equal(is, starts(1, 1, 1)) {
		t.Errorf("kubeconfigs that have expired: %v, %v\n%s", err, is, said)
	}
	for _, name := range names {
		remove(of(name, "locked-out"))
		remove(of(name, "units/keelson-controlplane.active"))
	}
	said, err = s.kctl("up")
	if is := s.cluster().Starts; err != nil || !maps.Equal(is, starts(2, 2, 2)) {
		t.Errorf("all have ended: %v, %v\n%s", err, is, said)
	}
	// The only one that can be asked does not run; the others do.
	remove(of("cp1", "units/keelson-controlplane.active"))
	for _, name := range names[1:] {
		remove(of(name, "var/lib/keelson/controlplane/admin.kubeconfig"))
	}
	said, err = s.kctl("up")
	if is := s.cluster().Starts; err != nil || !maps.Equal(is, starts(3, 2, 2)) {
		t.Errorf("the one that can be asked has ended: %v, %v\n%s", err, is, said)
	}
}
