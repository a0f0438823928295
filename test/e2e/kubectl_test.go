package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"keelson.dev/keelson/test/testenv"
)

// kubectlPrograms returns the paths of kctl and of the oldest and newest stock kubectl on the
// machine, by name.
func kubectlPrograms() map[string]string {
	out := map[string]string{"kctl": filepath.Join(testenv.Lab().Config.BinDir, "kctl")}
	if stock := testenv.StockKubectl(); len(stock) > 0 {
		out[filepath.Base(stock[0])] = stock[0]
		newest := stock[0]
		for _, s := range stock {
			if filepath.Base(s) > filepath.Base(newest) {
				newest = s
			}
		}
		out[filepath.Base(newest)] = newest
	}
	return out
}

const manifest = `
apiVersion: v1
kind: ConfigMap
metadata: {name: motd}
data: {greeting: "good morning"}
---
apiVersion: v1
kind: Pod
metadata: {name: one, labels: {app: one}}
spec:
  automountServiceAccountToken: false # with it, kubectl sends a patch of list orders alone and says "configured"
  terminationGracePeriodSeconds: 0
  containers:
  - name: main
    image: keelson.dev/tools:v1
    command: ["sh", "-c", "echo started; cat /etc/motd/greeting; echo; exec sleep 1000000"]
    volumeMounts: [{name: motd, mountPath: /etc/motd}]
  volumes: [{name: motd, configMap: {name: motd}}]
`

// F1 F2 F4 F13 F18: apply, get, describe, logs, exec and delete, with our command
// line and with stock ones.
func TestCommandLines(t *testing.T) {
	for name, path := range kubectlPrograms() {
		t.Run(name, func(t *testing.T) {
			w := newNamespace(t)
			file := filepath.Join(t.TempDir(), "m.yaml")
			if err := os.WriteFile(file, []byte(manifest), 0o600); err != nil {
				t.Fatal(err)
			}
			k := func(args ...string) string { return testenv.Must(t, path, append([]string{"-n", w.ns}, args...)...) }
			wants := func(out string, parts ...string) {
				t.Helper()
				for _, p := range parts {
					if !strings.Contains(out, p) {
						t.Errorf("%q is missing in:\n%s", p, out)
					}
				}
			}
			wants(k("apply", "-f", file), "pod/one created", "configmap/motd created")
			wants(k("apply", "-f", file), "pod/one unchanged", "configmap/motd unchanged")
			k("wait", "--for=condition=Ready", "pod/one", "--timeout=180s")
			wants(k("get", "pods", "-o", "wide"), "NAME", "READY", "STATUS", "RESTARTS", "AGE", "IP", "NODE", "one",
				"1/1", "Running", "10.244.")
			wants(k("get", "pod", "one", "-o", "yaml"), "phase: Running", "qosClass: BestEffort", "containerID: ")
			// Events and output appear slightly after the change that they report.
			for _, says := range [][]string{{"describe", "Status:", "Running", "Scheduled", "Successfully assigned",
				"Started"}, {"logs", "started\ngood morning\n"}} {
				args := map[string][]string{"describe": {"describe", "pod", "one"}, "logs": {"logs", "one"}}[says[0]]
				testenv.Eventually(t, soon, func() error { return requireWords(k(args...), says[1:]) })
			}
			wants(k("exec", "one", "--", "sh", "-c", "echo out; echo err >&2"), "out", "err")
			if out, err := testenv.Try(t, path, "-n", w.ns, "exec", "one", "--", "sh", "-c", "exit 7"); err == nil ||
				!strings.Contains(fmt.Sprint(err, out), "7") {
				t.Errorf("exec that exits with 7: %v %s", err, out)
			}
			wants(k("explain", "pod.spec.containers"), "image")
			wants(k("api-resources"), "deployments", "configmaps", "csidrivers")
			wants(k("auth", "can-i", "delete", "pods"), "yes")
			wants(k("label", "pod", "one", "colour=blue"), "labeled")
			wants(k("get", "pods", "-l", "colour=blue", "-o", "name"), "pod/one")
			wants(k("patch", "configmap", "motd", "--type=merge", "-p", `{"data":{"greeting":"good evening"}}`),
				"patched")
			wants(k("delete", "-f", file), `pod "one" deleted`, `configmap "motd" deleted`)
			if out := k("get", "pods", "-o", "name"); strings.TrimSpace(out) != "" &&
				!strings.Contains(out, "No resources") {
				t.Errorf("after delete: %s", out)
			}
		})
	}
}

// The README's fall-back: kctl finds the lab without any set-up.
func TestTraceShowsEveryStage(t *testing.T) {
	w := newNamespace(t)
	w.createService(webService("web", "ClusterIP"))
	w.createWeb(webDeployment("web", 1))
	w.awaitReplicas("web", 1)
	var out string
	testenv.Eventually(t, soon, func() error {
		var err error
		if out, err = testenv.Try(t, kubectlPrograms()["kctl"], "trace", "-n", w.ns, "deployment/web"); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		for _, stage := range []string{
			"authenticated", "authorized", "admitted", "validated", "committed", "replicaset created", "pod created",
			"scheduled", "received", "sandbox", "network", "volumes", "image", "container started",
			"probe passed", "Ready",
			"in EndpointSlice", "proxy programmed",
		} {
			if !strings.Contains(strings.ToLower(out), strings.ToLower(stage)) {
				return fmt.Errorf("stage %q is missing in:\n%s", stage, out)
			}
		}
		if !strings.Contains(out, ", leader cp") || !strings.Contains(out, "10.244.") {
			return fmt.Errorf("the leader or the pod's address is missing in:\n%s", out)
		}
		for _, node := range []string{"w1", "w2", "w3"} {
			if !strings.Contains(out, "on "+node) {
				return fmt.Errorf("the proxy of %s is missing in:\n%s", node, out)
			}
		}
		return nil
	})
	t.Logf("\n%s", out)
}
