package lab

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
)

func TestNewNamesHosts(t *testing.T) {
	l, err := New(Config{ControlPlanes: 3, Workers: 2}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	seen := map[string]bool{}
	for _, h := range l.Config.Hosts {
		names = append(names, h.Name)
		if seen[h.IP.String()] {
			t.Errorf("address %s twice", h.IP)
		}
		seen[h.IP.String()] = true
	}
	if want := []string{"cp1", "cp2", "cp3", "w1", "w2", "registry"}; !slices.Equal(names, want) {
		t.Errorf("hosts %v, want %v", names, want)
	}
	if _, err := l.Host("w9"); err == nil || !strings.Contains(err.Error(), "w9") ||
		!strings.Contains(err.Error(), "cp1") {
		t.Errorf("an unknown host: %v, want its name and what there is", err)
	}
	for _, c := range []Config{{ControlPlanes: 0}, {ControlPlanes: 1, Workers: 100}} {
		if _, err := New(c, io.Discard); err == nil {
			t.Errorf("%+v was accepted", c)
		}
	}
}

// Workers are on links in turn and replicas on the first; no address is given twice in either
// family.
func TestLinksAndFamilies(t *testing.T) {
	for families, want := range map[string][]string{
		"": {"w1 0 10.89.0.101", "w2 1 10.89.1.102", "w3 0 10.89.0.103", "cp1 0 10.89.0.11"},
		FamilyDual: {"w1 0 10.89.0.101,fd89::101", "w2 1 10.89.1.102,fd89:0:0:1::102", "w3 0 10.89.0.103,fd89::103",
			"cp1 0 10.89.0.11,fd89::11"},
		FamilyIPv6: {"w1 0 fd89::101", "w2 1 fd89:0:0:1::102", "w3 0 fd89::103", "cp1 0 fd89::11"},
	} {
		l, err := New(Config{ControlPlanes: 1, Workers: 3, Links: 2, Families: families}, io.Discard)
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range want {
			name, _, _ := strings.Cut(w, " ")
			if h, err := l.Host(name); err != nil || fmt.Sprintf("%s %d %s", h.Name, h.Link, h.nodeIPs()) != w {
				t.Errorf("%s: %+v, %v, want %s", families, h, err, w)
			}
		}
	}
	for _, c := range []Config{{ControlPlanes: 1, Links: maxLinks + 1}, {ControlPlanes: 1, Links: -1},
		{ControlPlanes: 1, Families: "ipx"}} {
		if _, err := New(c, io.Discard); err == nil {
			t.Errorf("%+v was accepted", c)
		}
	}
}

// Every worker knows every replica.
func TestDaemonCommandLines(t *testing.T) {
	l, err := New(Config{ControlPlanes: 3, Workers: 1, BinDir: "/b", CPU: "4", Memory: "2Gi"}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	w, _ := l.Host("w1")
	line := strings.Join(l.hosts().daemonArgs(w), " ")
	for _, want := range []string{"--server=10.89.0.11:6444", "--server=10.89.0.13:6444", "--node-name=w1",
		"--cgroup-root=/keelson-lab/w1"} {
		if !strings.Contains(line, want) {
			t.Errorf("%q is missing in %s", want, line)
		}
	}
	if strings.Contains(line, "--pod-network") {
		t.Errorf("unasked, a worker runs %s", line)
	}
	l.Config.PodNetwork = "wireguard"
	if line := strings.Join(l.hosts().daemonArgs(w), " "); !strings.HasSuffix(line, " --pod-network=wireguard") {
		t.Errorf("a worker runs %s", line)
	}
	if _, err := New(Config{ControlPlanes: 1, PodNetwork: "ipsec"}, io.Discard); err == nil ||
		!strings.Contains(err.Error(), `pod network "ipsec": want auto`) {
		t.Errorf("a network that there is not: %v", err)
	}
}

// The flags that an operator sets for the control plane are passed to every replica and to no other
// host. The lab's own flags stay.
func TestFlagsOfTheControlPlane(t *testing.T) {
	c := Config{ControlPlanes: 2, Workers: 1, BinDir: "/b",
		ControlPlaneFlags: []string{"--anonymous-auth=false", "--audit-log-maxsize=7"}}
	l, err := New(c, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range l.Config.Hosts {
		line := strings.Join(l.hosts().daemonArgs(h), " ")
		if got := strings.HasSuffix(line, " --anonymous-auth=false --audit-log-maxsize=7"); got !=
			(h.Role == RoleControlPlane) {
			t.Errorf("%s runs %s", h.Name, line)
		}
	}
	for flag, words := range map[string]string{
		"anonymous-auth=false": "begins with --", "": "begins with --",
		"--name=cp9": "the lab sets", "--data-dir": "the lab sets", "--advertise-address=10.0.0.1": "the lab sets",
	} {
		c.ControlPlaneFlags = []string{flag}
		if _, err := New(c, io.Discard); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("flag %q: %v, want an error with %q", flag, err, words)
		}
	}
	c.ControlPlaneFlags = nil
	for folder, words := range map[string]string{"/nowhere/at/all": "no such file", "/proc/self/status": "not a folder",
		"/run": "of its own"} {
		c.ControlPlaneFiles = folder
		if _, err := New(c, io.Discard); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("folder %q: %v, want an error with %q", folder, err, words)
		}
	}
}
