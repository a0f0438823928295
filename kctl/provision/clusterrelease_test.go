package provision

import (
	"maps"
	"path/filepath"
	"strings"
	"testing"
)

// After an upgrade to a release that the file does not name nothing goes back to that of the file by itself: the upgrade says what to
// write, and 'up' and 'add' refuse until it is written or the release is named. A release that understands less than is stored comes to
// no replica at all.
func TestClusterKeepsItsRelease(t *testing.T) {
	s := newSite(t)
	hosts := []string{"cp1 192.0.2.11 controlplane", "w1 192.0.2.21 worker"}
	s.write("", hosts...)
	if said, err := s.kctl("up"); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	former := s.release
	pack := func(version, level string) string {
		s.release, s.level = filepath.Join(s.dir, version), level
		s.pack(version)
		return s.release
	}
	next, old := pack("v2", ""), pack("v1-old", "1")
	said, err := s.kctl("upgrade", "--to", next)
	if want := "DIR/cluster.yaml names a release v1: have it say 'release: DIR/v2', since 'kctl " +
		"cluster up' and 'add' go by it\n"; err != nil || !strings.HasSuffix(said, want) {
		t.Errorf("%v\n%s\nwant %s", err, said, want)
	}
	before := s.cluster()
	refused := func(want string, verb string, args ...string) {
		t.Helper()
		said, err := s.kctl(verb, args...)
		if err == nil || !strings.Contains(strings.ReplaceAll(err.Error(), s.dir, "DIR"), want) {
			t.Errorf("%s %v: %v, want %s\n%s", verb, args, err, want, said)
		}
		if is := s.cluster(); !maps.Equal(is.Runs, before.Runs) || !maps.Equal(is.Starts, before.Starts) ||
			len(is.Nodes) != 1 {
			t.Errorf("%s %v: the cluster is %+v, and was %+v", verb, args, is, before)
		}
	}
	const goesBack = "nothing was changed: cp1 runs release v2, and DIR/cluster.yaml requires v1, which is not known " +
		"to be later. To keep the running release, " +
		"set 'release' in the file to v2. To install v1, run 'kctl cluster upgrade --to DIR/dist', or set --release"
	refused(goesBack, "up")
	refused(goesBack, "up", "--dry-run")
	hosts = append(hosts, "w2 192.0.2.22 worker")
	s.write("", hosts...)
	refused(goesBack, "add")
	refused("release v1-old supports feature levels up to 1, and the cluster's store has level 2: no replica of that "+
		"release can start", "up", "--release="+old)
	if said, err := s.kctl("add", "--release="+next); err != nil || s.cluster().Runs["w2 keelson-agent"] != "v2" {
		t.Errorf("%v\n%s", err, said)
	}
	if said, err := s.kctl("up", "--release="+former); err != nil ||
		s.cluster().Runs["cp1 keelson-controlplane"] != "v1" {
		t.Errorf("%v\n%s", err, said)
	}
}
