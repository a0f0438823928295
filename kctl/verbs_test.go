package kctl

import (
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// run executes a line of kctl as Main does, and returns the exit code and what is said of an error.
func run(line string) (code int, said string) {
	args := strings.Fields(line)
	root := Command(append([]string{"kctl"}, args...))
	root.SetOut(io.Discard)
	root.SetArgs(args)
	if c, err := root.ExecuteC(); err != nil {
		return 1, failure(c, err)
	}
	return 0, ""
}

// A word that is no command is an error, at every depth, and names where to look; errors of our verbs begin with kctl.
func TestUnknownCommands(t *testing.T) {
	for line, want := range map[string]string{
		"lab foo":              `kctl lab: there is no command "foo": 'kctl lab --help' lists them`,
		"lab statsu":           `kctl lab: there is no command "statsu": did you mean status?`,
		"cluster foo":          `kctl cluster: there is no command "foo": 'kctl cluster --help' lists them`,
		"cluster member foo":   `kctl cluster member: there is no command "foo"`,
		"cluster token foo":    `kctl cluster token: there is no command "foo"`,
		"lab restart":          `kctl lab restart: an argument is missing: kctl lab restart HOST`,
		"lab up --colour":      `kctl lab up: unknown flag: --colour`,
		"cluster restore":      `kctl cluster restore: `,
		"cluster step-down no": `kctl cluster step-down: "no" is an argument too many: kctl cluster step-down`,
		"trace":                `kctl trace: an argument is missing: kctl trace (TYPE/NAME | TYPE NAME)`,
		"why":                  `kctl why: an argument is missing: kctl why (TYPE/NAME | TYPE NAME)`,
		"net foo":              `kctl net: there is no command "foo": 'kctl net --help' lists them`,
		"net trace web-0":      `kctl net trace: an argument is missing: kctl net trace POD SERVICE|NAME|ADDRESS[:PORT][/PROTOCOL]|URL`,
		"net trace p db:x":     `kctl net trace: target "db:x": "x" is no port: a number from 1 to 65535`,
		"lab kill a b":         `kctl lab kill: "b" is an argument too many: kctl lab kill HOST`,
		"lab load":             `kctl lab load: an argument is missing: kctl lab load FILE...`,
		"lab exec w1":          `kctl lab exec: an argument is missing: kctl lab exec HOST COMMAND [ARG...]`,
		"foo":                  `error: unknown command "foo" for "kctl"`,
	} {
		code, said := run(line)
		if code != 1 || !strings.HasPrefix(said, want) {
			t.Errorf("kctl %s: exit code %d, %q, want %q", line, code, said, want)
		}
	}
	// The process as a whole: what Main makes of it.
	p := startKctl(t, "http://127.0.0.1:1", "lab", "foo")
	if code, said := p.ended(t); code != 1 || !strings.HasPrefix(said, "kctl lab: there is no command") {
		t.Errorf("kctl lab foo: exit code %d, %q", code, said)
	}
	for _, line := range []string{"lab", "cluster", "cluster member", "lab --help"} {
		if code, said := run(line); code != 0 || said != "" {
			t.Errorf("kctl %s: exit code %d, %q", line, code, said)
		}
	}
}

// Each own verb and each of its arguments can be completed.
func TestCompletion(t *testing.T) {
	_, url := slowPlane(t)
	for line, want := range map[string][]string{
		"lab re":                       {"replace", "restart"},
		"cluster member remove ":       {"cp1", "cp2", "cp3", "cp4"},
		"cluster member remove cp3":    {"cp3"},
		"cluster step-down --to ":      {"cp1", "cp2", "cp3", "cp4"},
		"cluster token create --role ": {"controlplane", "node"},
		"trace deployment/hello -o ":   {"json"},
		"cluster revoke node/":         {"node/w1", "node/w2"},
	} {
		words := strings.Split(line, " ")
		root := Command([]string{"kctl"})
		var out strings.Builder
		root.SetOut(&out)
		root.SetErr(&strings.Builder{})
		root.SetArgs(append([]string{"__complete", "--server=" + url}, words...))
		if err := root.Execute(); err != nil {
			t.Fatal(err)
		}
		var got []string
		for l := range strings.Lines(out.String()) {
			if l = strings.TrimSpace(l); l != "" && !strings.HasPrefix(l, ":") {
				word, _, _ := strings.Cut(l, "\t")
				got = append(got, word)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("kctl %s<TAB>: %q, want %q", line, got, want)
		}
	}
}

// Every verb that takes a host completes hosts.
func TestHostsAreCompleted(t *testing.T) {
	root := Command([]string{"kctl"})
	lab, _, err := root.Find([]string{"lab"})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range lab.Commands() {
		if strings.Contains(c.Use, "HOST") && c.ValidArgsFunction == nil {
			t.Errorf("%s does not complete its host", c.CommandPath())
		}
	}
}

// What a person reads names the verb once.
func TestFailure(t *testing.T) {
	root := &cobra.Command{Use: "kctl"}
	lab, get := &cobra.Command{Use: "lab"}, &cobra.Command{Use: "get"}
	kill := &cobra.Command{Use: "kill HOST"}
	root.AddCommand(lab, get)
	lab.AddCommand(kill)
	for _, c := range []struct {
		command   *cobra.Command
		err, want string
	}{
		{kill, `lab: no host "x"`, `kctl lab kill: no host "x"`},
		{get, "error: no such resource", "error: no such resource"},
		{root, "unknown", "error: unknown"},
		{nil, "unknown", "error: unknown"},
		{kill, "tls: certificate signed by unknown authority", "kctl lab kill: tls: certificate signed by unknown authority" + otherCAHint},
		{get, "certificate signed by unknown authority", "error: certificate signed by unknown authority" + otherCAHint},
	} {
		if got := failure(c.command, errors.New(c.err)); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}

// Who has no cluster yet is told how to come by one, not which port was refused.
func TestWithoutACluster(t *testing.T) {
	t.Setenv("KUBECONFIG", t.TempDir()+"/none")
	const want = "kctl cluster status: nothing says where the cluster is: 'kctl lab up' starts one on this machine"
	if code, said := run("cluster status"); code != 1 || !strings.HasPrefix(said, want) {
		t.Errorf("exit code %d, %q, want %q", code, said, want)
	}
}
