package kctl

import (
	"errors"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// run executes a line of kctl as Main does, and returns the exit code and what is said of an error.
func run(line string) (code int, said string) {
	args := strings.Fields(line)
	root := Command(append([]string{"kctl"}, args...))
	root.SetOut(io.Discard)
	root.SetArgs(args)
	if c, err := root.ExecuteC(); err != nil {
		return 1, commandErrorText(c, err)
	}
	return 0, ""
}

// A word that is no command is an error, at every depth, and names where to look; errors of our verbs begin with kctl.
func TestUnknownCommands(t *testing.T) {
	for line, want := range map[string]string{
		"lab foo":              `kctl lab: unknown command "foo": 'kctl lab --help' lists the commands`,
		"lab statsu":           `kctl lab: unknown command "statsu": did you mean status?`,
		"cluster foo":          `kctl cluster: unknown command "foo": 'kctl cluster --help' lists the commands`,
		"cluster member foo":   `kctl cluster member: unknown command "foo"`,
		"cluster token foo":    `kctl cluster token: unknown command "foo"`,
		"lab restart":          `kctl lab restart: missing argument: kctl lab restart HOST`,
		"lab up --colour":      `kctl lab up: unknown flag: --colour`,
		"cluster restore":      `kctl cluster restore: `,
		"cluster step-down no": `kctl cluster step-down: unexpected argument "no": kctl cluster step-down`,
		"cluster transfer-leader no": `kctl cluster transfer-leader: unexpected argument "no": kctl ` +
			`cluster transfer-leader`,
		"trace":   `kctl trace: missing argument: kctl trace (TYPE/NAME | TYPE NAME)`,
		"why":     `kctl why: missing argument: kctl why (TYPE/NAME | TYPE NAME)`,
		"net foo": `kctl net: unknown command "foo": 'kctl net --help' lists the commands`,
		"net trace web-0": `kctl net trace: missing argument: kctl net trace POD ` +
			`SERVICE|NAME|ADDRESS[:PORT][/PROTOCOL]|URL`,
		"net trace p db:x": `kctl net trace: target "db:x": invalid port "x": want a number from 1 to 65535`,
		"lab kill a b":     `kctl lab kill: unexpected argument "b": kctl lab kill HOST`,
		"lab load":         `kctl lab load: missing argument: kctl lab load FILE...`,
		"lab exec w1":      `kctl lab exec: missing argument: kctl lab exec HOST COMMAND [ARG...]`,
		"foo":              `error: unknown command "foo" for "kctl"`,
	} {
		code, said := run(line)
		if code != 1 || !strings.HasPrefix(said, want) {
			t.Errorf("kctl %s: exit code %d, %q, want %q", line, code, said, want)
		}
	}
	// The process as a whole: what Main makes of it.
	p := startKctl(t, "http://127.0.0.1:1", "lab", "foo")
	if code, said := p.ended(t); code != 1 || !strings.HasPrefix(said, "kctl lab: unknown command") {
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
		"lab re":                        {"replace", "restart", "restore"},
		"cluster member remove ":        {"cp1", "cp2", "cp3", "cp4"},
		"cluster member remove cp3":     {"cp3"},
		"cluster step-down --to ":       {"cp1", "cp2", "cp3", "cp4"},
		"cluster transfer-leader --to ": {"cp1", "cp2", "cp3", "cp4"},
		"cluster token create --role ":  {"controlplane", "node"},
		"trace deployment/hello -o ":    {"json"},
		"cluster revoke node/":          {"node/w1", "node/w2"},
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
		{kill, "tls: certificate signed by unknown authority",
			"kctl lab kill: tls: certificate signed by unknown authority" + untrustedCAText},
		{get, "certificate signed by unknown authority",
			"error: certificate signed by unknown authority" + untrustedCAText},
	} {
		if got := commandErrorText(c.command, errors.New(c.err)); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}

// Without a kubeconfig the error is one sentence that says how to get a cluster, and names a kubeconfig that does not exist.
func TestWithoutACluster(t *testing.T) {
	missing := t.TempDir() + "/none"
	const remedy = "start one on this machine with 'kctl lab up', or set KUBECONFIG or --kubeconfig"
	for kubeconfig, want := range map[string]string{
		missing: "kctl cluster status: KUBECONFIG is " + missing +
			", which does not exist, so no cluster is configured: " + remedy,
	} {
		t.Setenv("KUBECONFIG", kubeconfig)
		if code, said := run("cluster status"); code != 1 || strings.TrimSpace(said) != want {
			t.Errorf("KUBECONFIG=%q: exit code %d, %q, want %q", kubeconfig, code, said, want)
		}
	}
}

// A client that cannot reach the API ends with one sentence: what failed, at which address, and what to do. Answers of the API, and
// what other programs report, stay as they are.
func TestErrorsWithoutAnAPI(t *testing.T) {
	t.Setenv("KUBECONFIG", "")
	const other = "or set another kubeconfig with KUBECONFIG or --kubeconfig"
	refused := "no API server responds at 192.0.2.1:6443 (connection refused): start the control plane there ('kctl " +
		"lab up' in a lab), " + other
	unknown := "the host api.invalid of the API does not resolve (no such host): correct the server in " +
		"the kubeconfig or the DNS of this machine, " + other
	dial := func(cause string) error {
		return &url.Error{Op: "Get", URL: "https://192.0.2.1:6443/api", Err: errors.New(cause)}
	}
	for what, c := range map[string]struct {
		err  error
		want string
	}{
		"refused": {dial("dial tcp 192.0.2.1:6443: connect: connection refused"), refused},
		"refused, in IPv6": {dial("dial tcp [2001:db8::1]:6443: connect: connection refused"),
			strings.Replace(refused, "192.0.2.1:6443", "[2001:db8::1]:6443", 1)},
		"wrapped": {fmt.Errorf("reading Nodes: %w",
			dial("dial tcp 192.0.2.1:6443: connect: connection refused")), "reading Nodes: " + refused},
		"unknown host": {dial("dial tcp: lookup api.invalid on 192.0.2.53:53: no such host"),
			unknown},
		"unknown host, by the hosts file": {dial("dial tcp: lookup api.invalid: no such host"), unknown},
		"no route": {dial("dial tcp 192.0.2.1:6443: connect: no route to host"),
			"no API server responds at 192.0.2.1:6443 (no route to host): check the routes and " +
				"firewalls between this machine and the control plane, " + other},
		"silence": {dial("dial tcp 192.0.2.1:6443: i/o timeout"),
			"no API server responds at 192.0.2.1:6443 (i/o timeout): check the routes and firewalls between this " +
				"machine and the control plane, " + other},
		"another program's": {errors.New("cp1: dial tcp 192.0.2.1:22: connect: connection refused"),
			"cp1: dial tcp 192.0.2.1:22: connect: connection refused"},
		"an answer of the API": {apierrors.NewInternalError(
			dial("dial tcp 192.0.2.1:443: connect: connection refused")),
			`Internal error occurred: Get "https://192.0.2.1:6443/api": dial tcp 192.0.2.1:443: connect: ` +
				`connection refused`},
	} {
		if got := errorText(c.err); got != c.want {
			t.Errorf("%s: %s\nwant %s", what, got, c.want)
		}
	}
	for text, want := range map[string]string{
		"The connection to the server 192.0.2.1:6443 was refused - did you specify the right host or port?": "error: " +
			refused,
		"Unable to connect to the server: dial tcp: lookup api.invalid: no such host\n": "error: " +
			unknown,
		`error: error validating "x.yaml": error validating data: failed to download openapi: Get ` +
			`"https://192.0.2.1:6443/openapi/v2?timeout=32s": ` +
			"dial tcp 192.0.2.1:6443: connect: connection refused; if you choose to ignore these errors, turn " +
			"validation off with --validate=false": "error: " + refused,
		"The connection to the server localhost:8080 was refused - did you specify the right host or " +
			"port?": "error: no cluster is configured: " +
			"start one on this machine with 'kctl lab up', or set KUBECONFIG or --kubeconfig",
		"Unable to connect to the server: net/http: TLS handshake timeout": "Unable to connect to the server: " +
			"net/http: TLS handshake timeout",
		`Error from server (InternalError): failed calling webhook: Post "https://a.b.svc:443/": dial tcp ` +
			`192.0.2.9:443: connect: connection refused`: "" +
			`Error from server (InternalError): failed calling webhook: Post "https://a.b.svc:443/": dial tcp ` +
			`192.0.2.9:443: connect: connection refused`,
	} {
		if got := fatalText(text); got != want {
			t.Errorf("%s\nbecomes %s\nwant    %s", text, got, want)
		}
	}
}
