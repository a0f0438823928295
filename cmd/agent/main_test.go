package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"keelson.dev/keelson/cmd/internal/commandline"
)

// run runs the program with arguments and returns its error.
func run(t *testing.T, args ...string) error {
	_, err := commandline.Execute(t.Context(), newCommand(), args)
	return err
}

// What an agent would refuse when it starts, check says before: by file, line and key. It writes nothing.
func TestCheckOfSettings(t *testing.T) {
	for _, c := range []struct{ file, more, want string }{
		{"server: [192.0.2.11:6444]\nnode-name: w1\nmax-pods: 60\nverbose: true\n", "", ""},
		{"server: [192.0.2.11:6444]\nnode-name: w1\nmax-pod: 60\n", "",
			`FILE, line 3: unknown key "max-pod": the nearest is max-pods`},
		{"server: [192.0.2.11:6444]\nnode-name: w1\nmax-pods: many\n", "",
			"FILE, line 3: max-pods: want a whole number"},
		{"server: [192.0.2.11:6444]\nnode-name: w1\nfence-after: 1s\n", "", "--fence-after 1s: want whole seconds"},
		{"server: [192.0.2.11:6444]\nnode-name: w_1\n", "", `--node-name "w_1"`},
		{"node-name: w1\n", "", "--server is missing"},
		{"node-name: w1\n", "--server=192.0.2.11:6444", ""},
		{"node-name: w1\n", "--sever=192.0.2.11:6444", "unknown flag: --sever"},
		{"node-name: w1\n", "-server=192.0.2.11:6444 -verbose", ""}, // one dash, as in previous releases
		{"node-name: w1\n", "other.yaml", "check takes flags alone, and other.yaml is none"},
	} {
		dir := t.TempDir()
		path := filepath.Join(dir, "agent.yaml")
		state := filepath.Join(dir, "state")
		if err := os.WriteFile(path, []byte(c.file), 0o600); err != nil {
			t.Fatal(err)
		}
		err := run(t, append([]string{"check", "--config=" + path, "--state-dir=" + state},
			strings.Fields(c.more)...)...)
		if want := strings.ReplaceAll(c.want, "FILE", path); (err == nil) != (want == "") ||
			err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q %s: %v, want %q", c.file, c.more, err, want)
		}
		if _, err := os.Stat(state); err == nil {
			t.Errorf("%q: it made %s", c.file, state)
		}
	}
	if err := run(t, "check", "--config=/does/not/exist"); err == nil ||
		!strings.Contains(err.Error(), "/does/not/exist") {
		t.Errorf("a file that is named must exist: %v", err)
	}
}

// An invalid command line is an error about usage, after which the program exits with 2, before anything happens.
func TestErrorsAboutTheCommandLine(t *testing.T) {
	for args, want := range map[string]string{
		"--sever=a":    "unknown flag: --sever",
		"--max-pods=x": `invalid argument "x" for "--max-pods" flag`,
		"-max-pods x":  `invalid argument "x" for "--max-pods" flag`,
		"start": "unexpected argument start: the commands are check, end-pods, remove-network " +
			"and remove-volumes",
		"end-pods now":                                    "unexpected argument now",
		"--verbose remove-network w1":                     "unexpected argument w1",
		"remove-volumes w1":                               "unexpected argument w1",
		"--config=/does/not/exist":                        "/does/not/exist",
		"-config /does/not/exist":                         "/does/not/exist",
		"end-pods --config=/not/there":                    "/not/there",
		"--config= --fence-after=1s end-pods --node-name": "flag needs an argument: --node-name",
	} {
		var usage *commandline.UsageError
		if err := run(t, strings.Fields(args)...); !errors.As(err, &usage) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", args, err, want)
		}
	}
}
