package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What an agent would refuse when it starts, check says before: by file, line and key. It writes nothing.
func TestCheckOfSettings(t *testing.T) {
	for _, c := range []struct{ file, more, want string }{
		{"server: [192.0.2.11:6444]\nnode-name: w1\nmax-pods: 60\nverbose: true\n", "", ""},
		{"server: [192.0.2.11:6444]\nnode-name: w1\nmax-pod: 60\n", "", `FILE, line 3: unknown key "max-pod": the nearest is max-pods`},
		{"server: [192.0.2.11:6444]\nnode-name: w1\nmax-pods: many\n", "", "FILE, line 3: max-pods: want a whole number"},
		{"server: [192.0.2.11:6444]\nnode-name: w1\nfence-after: 1s\n", "", "--fence-after 1s: want whole seconds"},
		{"server: [192.0.2.11:6444]\nnode-name: w_1\n", "", `--node-name "w_1"`},
		{"node-name: w1\n", "", "--server is missing"},
		{"node-name: w1\n", "--server=192.0.2.11:6444", ""},
		{"node-name: w1\n", "--sever=192.0.2.11:6444", "flag provided but not defined: -sever"},
		{"node-name: w1\n", "other.yaml", "check takes flags alone, and other.yaml is none"},
	} {
		dir := t.TempDir()
		path := filepath.Join(dir, "agent.yaml")
		state := filepath.Join(dir, "state")
		if err := os.WriteFile(path, []byte(c.file), 0o600); err != nil {
			t.Fatal(err)
		}
		err := check(append([]string{"--config=" + path, "--state-dir=" + state}, strings.Fields(c.more)...))
		if want := strings.ReplaceAll(c.want, "FILE", path); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q %s: %v, want %q", c.file, c.more, err, want)
		}
		if _, err := os.Stat(state); err == nil {
			t.Errorf("%q: it made %s", c.file, state)
		}
	}
	if err := check([]string{"--config=/does/not/exist"}); err == nil || !strings.Contains(err.Error(), "/does/not/exist") {
		t.Errorf("a file that is named must exist: %v", err)
	}
}
