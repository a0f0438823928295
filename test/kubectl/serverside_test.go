package kubectl_test

import (
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

const (
	motd     = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: motd, namespace: default}\ndata: {"
	replicaN = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: default}
spec:
  REPLICAS
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: main, image: "keelson.dev/hello:v1"}]}
`
)

// oneKubectl runs f with one kubectl of this machine.
func oneKubectl(t *testing.T, f func(k *apiservertest.Kubectl)) {
	all := apiservertest.StockKubectls()
	for _, name := range []string{"kubectl.1.33", "kubectl", "kubectl.1.30"} {
		if binary := all[name]; binary != "" {
			r := apiservertest.StartReplica(t, nil)
			f(&apiservertest.Kubectl{T: t, Binary: binary, Config: r.Kubeconfig("admin", "system:masters"),
				Home: t.TempDir()})
			return
		}
	}
	t.Skip("no stock kubectl on this machine")
}

// A client can change from client-side to server-side apply and back. A field that is removed from
// the file is removed from the object.
func TestMigrationToServerSideApply(t *testing.T) {
	oneKubectl(t, func(k *apiservertest.Kubectl) {
		data := func() string { return k.Ok("", "get", "configmap", "motd", "-o", "jsonpath={.data}") }
		managers := func() string {
			return k.Ok("", "get", "configmap", "motd", "--show-managed-fields", "-o",
				"jsonpath={range .metadata.managedFields[*]}{.manager}/{.operation} {end}")
		}
		k.Ok(motd+`a: "1", b: "2"}`, "apply", "-f", "-")
		k.Ok(motd+`a: "3"}`, "apply", "--server-side", "-f", "-")
		if got := data(); got != `{"a":"3"}` {
			t.Errorf("after the first apply on the server's side: %s", got)
		}
		if got := managers(); strings.Contains(got, "/Update ") || !strings.Contains(got, "kubectl/Apply ") {
			t.Errorf("managers: %s", got)
		}
		k.Ok(motd+`a: "3", c: "4"}`, "apply", "--server-side", "-f", "-")
		k.Ok(motd+`c: "4"}`, "apply", "-f", "-") // from the client's side: by the annotation, which the server has kept
		if got := data(); got != `{"c":"4"}` {
			t.Errorf("after an apply on the client's side: %s", got)
		}
		k.Ok(motd+`d: "5"}`, "apply", "--server-side", "--dry-run=server", "-f", "-")
		if got := data(); got != `{"c":"4"}` {
			t.Errorf("after an apply that was dry: %s", got)
		}
		if said := k.Fails(motd+`c: "5"}`, "apply", "--server-side", "--field-manager=ci.example.com/deploy", "-f",
			"-"); !strings.Contains(said, "conflict") || !strings.Contains(said, ".data.c") {
			t.Errorf("another manager's apply: %s", said)
		}
		k.Ok(motd+`c: "5"}`, "apply", "--server-side", "--force-conflicts",
			"--field-manager=ci.example.com/deploy", "-f", "-")
		if got := managers(); !strings.Contains(got, "ci.example.com/deploy/Apply ") {
			t.Errorf("managers: %s", got)
		}
	})
}

// A client that scales owns the number of replicas. An apply with another number conflicts, and an
// apply without a number keeps it.
func TestServerSideApplyAndScale(t *testing.T) {
	oneKubectl(t, func(k *apiservertest.Kubectl) {
		with := func(replicas string) string { return strings.Replace(replicaN, "REPLICAS", replicas, 1) }
		number := func() string { return k.Ok("", "get", "deployment", "web", "-o", "jsonpath={.spec.replicas}") }
		k.Ok(with("replicas: 3"), "apply", "--server-side", "-f", "-")
		k.Ok("", "scale", "deployment", "web", "--replicas=10")
		if said := k.Fails(with("replicas: 3"), "apply", "--server-side", "-f", "-"); !strings.Contains(said,
			`with subresource "scale" using apps/v1: .spec.replicas`) {
			t.Errorf("an apply over what was scaled: %s", said)
		}
		k.Ok(with(""), "apply", "--server-side", "-f", "-")
		if n := number(); n != "10" {
			t.Errorf("scaled to 10, then applied without replicas: %s", n)
		}
		k.Ok(with("replicas: 2"), "apply", "--server-side", "--force-conflicts", "-f", "-")
		k.Ok(with(""), "apply", "--server-side", "-f", "-")
		if n := number(); n != "1" {
			t.Errorf("nobody states the number any more, it is %s", n)
		}
	})
}
