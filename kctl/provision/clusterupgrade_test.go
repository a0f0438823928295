package provision

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Machines are brought to another release while their cluster serves: replicas one after the other, the one that leads last and
// after a hand-over, then agents, one of them drained. What was cut off goes on; what is done is not done again.
func TestClusterUpgrade(t *testing.T) {
	s := newSite(t)
	s.write("", "cp1 192.0.2.11 controlplane", "cp2 192.0.2.12 controlplane,worker", "cp3 192.0.2.13 controlplane",
		"w1 192.0.2.21 worker")
	if said, err := s.kctl("up"); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	dist := filepath.Join(s.dir, "dist")
	refuse := func(want string, args ...string) {
		t.Helper()
		before := s.cluster().Done
		if said, err := s.kctl("upgrade", args...); err == nil || !strings.Contains(err.Error(), want) ||
			!slices.Equal(before, s.cluster().Done) {
			t.Errorf("%v: %v, want %s\n%s", args, err, want, said)
		}
	}
	refuse("--to is missing")
	refuse("no such file or directory", "--to", filepath.Join(s.dir, "nowhere"))
	if said, err := s.kctl("upgrade", "--to", dist, "--dry-run"); err != nil ||
		!strings.Contains(said, "there is nothing to do") {
		t.Errorf("%v\n%s", err, said)
	}
	s.pack("v2")
	refuse(`"w9" is to be drained, and there is no such node: there are cp2, w1`, "--to", dist, "--drain", "w9")
	begun := len(s.cluster().Done)
	said, err := s.kctl("upgrade", "--to", dist, "--drain", "w1", "--dry-run")
	plan := `
replica cp2: programs exchanged, started again
replica cp3: programs exchanged, started again
cp1 hands the lead over to cp2
replica cp1: programs exchanged, started again
node cp2: programs exchanged, pods stay
node w1: drained
node w1: programs exchanged, pods stay
node w1: takes pods again
`
	if err != nil || !strings.HasSuffix(said, plan) || len(s.cluster().Done) != begun {
		t.Errorf("%v\n%s", err, said)
	}
	said, err = s.kctl("upgrade", "--to", dist, "--drain", "w1")
	want := []string{"restart cp2 keelson-controlplane", "restart cp3 keelson-controlplane", "lead cp2",
		"restart cp1 keelson-controlplane",
		"restart cp2 keelson-agent", "w1 closed true begun", "w1 closed true drained", "restart w1 keelson-agent",
		"w1 closed false "}
	if is := s.cluster(); err != nil || !slices.Equal(is.Done[begun:], want) || is.Leader != "cp2" {
		t.Errorf("%v, %q leads after\n%s\n%s", err, is.Leader, strings.Join(is.Done[begun:], "\n"), said)
	}
	for what, release := range s.cluster().Runs {
		if release != "v2" {
			t.Errorf("%s runs %s", what, release)
		}
	}
	done := len(s.cluster().Done)
	said, err = s.kctl("upgrade", "--to", dist)
	if err != nil || !strings.Contains(said, "every replica and node has the programs") ||
		len(s.cluster().Done) != done {
		t.Errorf("again: %v\n%s", err, said)
	}
}

// It goes back to the release before in the same order, from everywhere and from the midst of the way, as long as that understands
// what is stored.
func TestClusterUpgradeGoesBack(t *testing.T) {
	s := newSite(t)
	s.write("", "cp1 192.0.2.11 controlplane", "cp2 192.0.2.12 controlplane", "cp3 192.0.2.13 controlplane",
		"w1 192.0.2.21 worker")
	if said, err := s.kctl("up"); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	before, dist := s.cluster().Runs["cp1 keelson-controlplane"], filepath.Join(s.dir, "dist")
	to := func(version string, args ...string) []string {
		t.Helper()
		s.pack(version)
		begun := len(s.cluster().Done)
		if said, err := s.kctl("upgrade", append([]string{"--to", dist}, args...)...); err != nil {
			t.Fatalf("to %s: %v\n%s", version, err, said)
		}
		return s.cluster().Done[begun:]
	}
	to("v2", "--skip", "cp3,w1")
	leader := s.cluster().Leader
	back := to(before)
	if i := slices.Index(back, "restart "+leader+" keelson-controlplane"); i < 1 ||
		!strings.HasPrefix(back[i-1], "lead ") || i != len(back)-1 {
		t.Errorf("back from the midst, where %s leads: %v", leader, back)
	}
	to("v2")
	for _, release := range s.cluster().Runs {
		if release != "v2" {
			t.Fatalf("%v", s.cluster().Runs)
		}
	}
	back = to(before)
	if len(back) != 5 || back[4] != "restart w1 keelson-agent" || !strings.HasPrefix(back[2], "lead ") {
		t.Errorf("back: %v", back)
	}
	for what, release := range s.cluster().Runs {
		if release != before {
			t.Errorf("%s runs %s and not %s", what, release, before)
		}
	}
}

// A machine on which the release does not start stops the upgrade: who comes after it is as it was. With the cause gone it goes on.
func TestClusterUpgradeStops(t *testing.T) {
	s := newSite(t)
	s.write("", "cp1 192.0.2.11 controlplane", "w1 192.0.2.21 worker", "w2 192.0.2.22 worker")
	if said, err := s.kctl("up"); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	s.pack("v2")
	dist := filepath.Join(s.dir, "dist")
	systemctl := filepath.Join(s.dir, "w1-bin", "systemctl")
	whole, err := os.ReadFile(systemctl)
	if err != nil {
		t.Fatal(err)
	}
	put(t, systemctl, "#!/bin/sh\n[ \"$1\" != restart ] || exit 1\n"+string(whole), 0o755)
	said, err := s.kctl("upgrade", "--to", dist)
	runs := s.cluster().Runs
	if err == nil || !strings.Contains(err.Error(), "stopped at this step: node w1: programs exchanged") ||
		runs["cp1 keelson-controlplane"] != "v2" || runs["w1 keelson-agent"] != "v1" ||
		runs["w2 keelson-agent"] != "v1" {
		t.Errorf("%v %v\n%s", err, runs, said)
	}
	put(t, systemctl, string(whole), 0o755)
	said, err = s.kctl("upgrade", "--to", dist)
	if runs = s.cluster().Runs; err != nil || runs["w1 keelson-agent"] != "v2" || runs["w2 keelson-agent"] != "v2" {
		t.Errorf("%v %v\n%s", err, runs, said)
	}
	// A machine that the file does not name cannot be reached.
	s.write("", "cp1 192.0.2.11 controlplane", "w1 192.0.2.21 worker")
	if said, err := s.kctl("upgrade", "--to", dist); err == nil ||
		!strings.Contains(err.Error(), "nothing was changed: w2: part of the cluster, but not in") {
		t.Errorf("%v\n%s", err, said)
	}
	if said, err := s.kctl("upgrade", "--to", dist, "--skip", "w2"); err != nil {
		t.Errorf("%v\n%s", err, said)
	}
}

func TestUpgradeNodesParsed(t *testing.T) {
	nodes, err := parseUpgradeNodes("w1\tkeelson://1\tdrained\ttrue\t{\"type\":\"Ready\",\"status\":\"False\"," +
		"\"message\":\"no runtime\"}\t\t{\"type\":\"keelson.dev/Degraded\",\"status\":\"True\"}\n")
	if err != nil || len(nodes) != 1 || nodes[0].Name != "w1" || !nodes[0].Spec.Unschedulable ||
		nodeProblem(&nodes[0]) != "it is not Ready: no runtime" || len(nodes[0].Status.Conditions) != 2 {
		t.Errorf("%+v %v", nodes, err)
	}
	for _, bad := range []string{"w1\tx\n", "w1\t\t\t\t{\t\t\n"} {
		if _, err := parseUpgradeNodes(bad); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}
