package lab

import (
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
	if _, err := l.Host("w9"); err == nil || !strings.Contains(err.Error(), "w9") || !strings.Contains(err.Error(), "cp1") {
		t.Errorf("an unknown host: %v, want its name and what there is", err)
	}
	for _, c := range []Config{{ControlPlanes: 0}, {ControlPlanes: 1, Workers: 100}} {
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
	line := strings.Join(l.daemon(w), " ")
	for _, want := range []string{"--server=10.89.0.11:6444", "--server=10.89.0.13:6444", "--node-name=w1", "--cgroup-root=/keelson-lab/w1"} {
		if !strings.Contains(line, want) {
			t.Errorf("%q is missing in %s", want, line)
		}
	}
}
