package execute

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"keelson.dev/keelson/deploy/machines"
)

// What the cluster refuses is its answer; who gets none asks another replica.
func TestAnswered(t *testing.T) {
	for said, want := range map[string]bool{
		`Error from server (NotFound): nodes "w9" not found`:     true,
		`Error from server (Forbidden): nodes "w1" is forbidden`: true,
		`error: unable to drain node "w1" due to error: error when waiting for pod "a" in namespace "default" to ` +
			`terminate: global timeout reached: 10m0s, continuing command...`: true,
		`kctl cluster member remove: raftstore: no such member: "cp9" is not among cp1, ` +
			`cp2, cp3`: true,
		`kctl cluster member remove: raftstore: change would leave no majority: of the voters that ` +
			`would be left only ` +
			`1 of 2 can be reached`: true,
		`The connection to the server 192.0.2.11:6443 was refused - did you specify the right host or ` +
			`port?`: false,
		`Unable to connect to the server: dial tcp 192.0.2.11:6443: connect: no route to ` +
			`host`: false,
		`Unable to connect to the server: net/http: TLS handshake ` +
			`timeout`: false,
		`kctl cluster status: Get "https://192.0.2.11:6443/cluster/status": dial tcp 192.0.2.11:6443: connect: ` +
			`connection refused`: false,
		`error: no API server responds at 192.0.2.11:6443 (connection refused): start the control plane there ('kctl ` +
			`lab up' in a lab), or set another kubeconfig with KUBECONFIG or --kubeconfig`: false,
		`kctl cluster status: no API server responds at 192.0.2.11:6443 (no route to host): check the routes and ` +
			`firewalls between this machine and the control plane`: false,
		`kctl cluster status: the host cp1 of the API does not resolve (no such host): correct the server in the ` +
			`kubeconfig or the DNS of this machine`: false,
		`Get "https://192.0.2.11:6443/cluster/status": EOF`: false,
		`error: You must be logged in to the server ` +
			`(Unauthorized)`: false,
		`Unable to connect to the server: remote error: tls: expired ` +
			`certificate`: false,
		`Error from server (ServiceUnavailable): update nodes "w1": the store has no ` +
			`leader`: false,
		`Error from server (Timeout): the server was unable to return a response in the time ` +
			`allotted`: false,
		`kctl cluster token create: unknown flag: ` +
			`--replace`: false,
		`error: stat /var/lib/keelson/controlplane/admin.kubeconfig: no such file or ` +
			`directory`: false,
	} {
		if got := isClusterAnswer(fmt.Errorf("cp1: %w", &machines.CommandError{Status: 1, Output: said})); got != want {
			t.Errorf("%s: %v, want %v", said, got, want)
		}
	}
	for _, err := range []error{errors.New("cp1: the connection has ended"), &machines.CommandError{Status: -1},
		&machines.CommandError{Status: 127, Output: "sh: kctl: not found"}} {
		if isClusterAnswer(err) {
			t.Errorf("%v is taken for an answer", err)
		}
	}
}

// A replica of the cluster is reached without the proxy that a machine's sessions are told of, as by /etc/environment.
func TestKctlGoesThroughNoProxy(t *testing.T) {
	root := t.TempDir()
	program := filepath.Join(root, "usr/bin/kctl")
	if err := os.MkdirAll(filepath.Dir(program), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(program, []byte("#!/bin/sh\nenv\nfor word; do echo \"word $word\"; done\n"), 0o755); err !=
		nil {
		t.Fatal(err)
	}
	c := exec.Command("sh", "-c", kctlScript([]string{"get", "nodes", "it's one"}))
	c.Env = []string{"DESTDIR=" + root, "PATH=" + os.Getenv("PATH"), "no_proxy=localhost"}
	for _, name := range []string{"http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"} {
		c.Env = append(c.Env, name+"=http://192.0.2.1:3128")
	}
	out, err := c.CombinedOutput()
	if err != nil || strings.Contains(string(out), "192.0.2.1") {
		t.Errorf("%v: kctl's environment is\n%s", err, out)
	}
	if want := "word --kubeconfig\nword " + root + adminKubeconfig +
		"\nword get\nword nodes\nword it's one\n"; !strings.HasSuffix(string(out), want) {
		t.Errorf("it is called with\n%s", out)
	}
}
