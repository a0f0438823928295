package apiserver

import (
	"strings"
	"testing"
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
func oneKubectl(t *testing.T, f func(k *kubectl)) {
	all := stockKubectls()
	for _, name := range []string{"kubectl.1.33", "kubectl", "kubectl.1.30"} {
		if binary := all[name]; binary != "" {
			r := start(t, nil)
			f(&kubectl{t: t, binary: binary, config: r.kubeconfig("admin", "system:masters"), home: t.TempDir()})
			return
		}
	}
	t.Skip("no stock kubectl on this machine")
}

// Who applied from the client's side can go over to the server's, and back: what leaves the file leaves the object.
func TestGoesOverToServerSideApply(t *testing.T) {
	oneKubectl(t, func(k *kubectl) {
		data := func() string { return k.ok("", "get", "configmap", "motd", "-o", "jsonpath={.data}") }
		managers := func() string {
			return k.ok("", "get", "configmap", "motd", "--show-managed-fields", "-o", "jsonpath={range .metadata.managedFields[*]}{.manager}/{.operation} {end}")
		}
		k.ok(motd+`a: "1", b: "2"}`, "apply", "-f", "-")
		k.ok(motd+`a: "3"}`, "apply", "--server-side", "-f", "-")
		if got := data(); got != `{"a":"3"}` {
			t.Errorf("after the first apply on the server's side: %s", got)
		}
		if got := managers(); strings.Contains(got, "/Update ") || !strings.Contains(got, "kubectl/Apply ") {
			t.Errorf("managers: %s", got)
		}
		k.ok(motd+`a: "3", c: "4"}`, "apply", "--server-side", "-f", "-")
		k.ok(motd+`c: "4"}`, "apply", "-f", "-") // from the client's side: by the annotation, which the server has kept
		if got := data(); got != `{"c":"4"}` {
			t.Errorf("after an apply on the client's side: %s", got)
		}
		k.ok(motd+`d: "5"}`, "apply", "--server-side", "--dry-run=server", "-f", "-")
		if got := data(); got != `{"c":"4"}` {
			t.Errorf("after an apply that was dry: %s", got)
		}
		if said := k.fails(motd+`c: "5"}`, "apply", "--server-side", "--field-manager=ci.example.com/deploy", "-f", "-"); !strings.Contains(said, "conflict") || !strings.Contains(said, ".data.c") {
			t.Errorf("another manager's apply: %s", said)
		}
		k.ok(motd+`c: "5"}`, "apply", "--server-side", "--force-conflicts", "--field-manager=ci.example.com/deploy", "-f", "-")
		if got := managers(); !strings.Contains(got, "ci.example.com/deploy/Apply ") {
			t.Errorf("managers: %s", got)
		}
	})
}

// Who scales owns the number of replicas: an apply that states another one is told so, one that states none leaves it.
func TestServerSideApplyAndScale(t *testing.T) {
	oneKubectl(t, func(k *kubectl) {
		with := func(replicas string) string { return strings.Replace(replicaN, "REPLICAS", replicas, 1) }
		number := func() string { return k.ok("", "get", "deployment", "web", "-o", "jsonpath={.spec.replicas}") }
		k.ok(with("replicas: 3"), "apply", "--server-side", "-f", "-")
		k.ok("", "scale", "deployment", "web", "--replicas=10")
		if said := k.fails(with("replicas: 3"), "apply", "--server-side", "-f", "-"); !strings.Contains(said, `with subresource "scale" using apps/v1: .spec.replicas`) {
			t.Errorf("an apply over what was scaled: %s", said)
		}
		k.ok(with(""), "apply", "--server-side", "-f", "-")
		if n := number(); n != "10" {
			t.Errorf("scaled to 10, then applied without replicas: %s", n)
		}
		k.ok(with("replicas: 2"), "apply", "--server-side", "--force-conflicts", "-f", "-")
		k.ok(with(""), "apply", "--server-side", "-f", "-")
		if n := number(); n != "1" {
			t.Errorf("nobody states the number any more, it is %s", n)
		}
	})
}
