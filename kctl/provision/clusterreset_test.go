package provision

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A reset leaves a node alone that may be another cluster's: no control plane of the file tells. What it could not take away the next one
// takes, and CNI plugins that were there before are nothing of Keelson's.
func TestClusterReset(t *testing.T) {
	s := newSite(t)
	hosts := []string{"cp1 192.0.2.11 controlplane", "w1 192.0.2.21 worker"}
	s.write("", append(hosts, "cp9 192.0.2.19 controlplane")...)
	w1 := s.all["w1"]
	put(t, filepath.Join(w1.root, "opt/cni/bin/bridge"), "of somebody", 0o755)
	before := w1.tree(t)
	s.write("", hosts...)
	if said, err := s.kctl("up"); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	s.write("", "cp9 192.0.2.19 controlplane", hosts[1])
	was := w1.tree(t)
	if said, err := s.kctl("reset", "prod"); err == nil ||
		!strings.Contains(err.Error(), "nothing was changed: w1: a node of a cluster, of which no control plane of "+
			"the file was reached") || !maps.Equal(was, w1.tree(t)) {
		t.Errorf("a node of another cluster: %v\n%s", err, said)
	}
	s.write("", hosts...)
	at := filepath.Join(w1.root, "usr/lib/keelson/uninstall.sh")
	script, err := os.ReadFile(at)
	if err != nil {
		t.Fatal(err)
	}
	put(t, at, "echo the disk is full >&2; exit 1\n", 0o755)
	if said, err := s.kctl("reset", "prod"); err == nil || !strings.Contains(err.Error(), "the disk is full") ||
		len(s.all["cp1"].tree(t)) > len(before) {
		t.Errorf("what cannot be taken away: %v\n%s", err, said)
	}
	put(t, at, string(script), 0o755)
	for _, again := range []bool{false, true} {
		said, err := s.kctl("reset", "prod")
		if err != nil || !strings.Contains(said, "the cluster prod was removed from") ||
			strings.Contains(said, "uninstall") == again {
			t.Errorf("again (%v): %v\n%s", again, err, said)
		}
	}
	if is := w1.tree(t); is["/opt/cni/bin/bridge"] == "" || len(is) > len(before)+1 { // the units that the model notes
		t.Errorf("w1 has %v, and had %v", is, before)
	}
}
