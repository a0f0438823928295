package lab

import (
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Only a host that runs the programs of another folder has that folder on its command line.
func TestProgramsOfOneHost(t *testing.T) {
	l, err := New(Config{ControlPlanes: 2, Workers: 2, BinDir: "/new", Programs: "/old", CPU: "4", Memory: "2Gi"},
		io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	for i := range l.Config.Hosts {
		if h := &l.Config.Hosts[i]; h.Name == "cp2" || h.Name == "w1" {
			h.BinDir = "" // the lab's own, as Replace has it
		}
	}
	var got []string
	for _, h := range l.Config.Hosts {
		got = append(got, h.Name+" "+l.hosts().daemonArgs(h)[0])
	}
	want := []string{"cp1 /old/keelson-controlplane", "cp2 /new/keelson-controlplane", "w1 /new/keelson-agent",
		"w2 /old/keelson-agent", "registry /new/kctl"}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// What no host could run from is refused by name, before anything is stopped.
func TestRefusedReplacements(t *testing.T) {
	// The lab of 'make up' may have power, and has fewer workers.
	l, err := New(Config{ControlPlanes: 1, Workers: 20, BinDir: "/b"}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "keelson-agent"), []byte("x"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ host, want string }{
		{"w99", `no host "w99"`},
		{"registry", "neither a replica nor a worker"},
		{"w20", "has no power"},
	} {
		if err := l.Replace(t.Context(), c.host, dir); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %s", c.host, err, c.want)
		}
	}
	for role, want := range map[Role]string{
		RoleWorker:       "keelson-shim is no program in " + dir,
		RoleControlPlane: "keelson-controlplane is no program in " + dir,
	} {
		if err := checkPrograms(dir, role); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", role, err, want)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "keelson-controlplane"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := checkPrograms(dir, RoleControlPlane); err == nil {
		t.Error("a file that nobody may execute was taken for a program")
	}
}
