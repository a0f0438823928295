package apiserver

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// stockKubectls finds the kubectl binaries of this machine, by name.
func stockKubectls() map[string]string {
	found := map[string]string{}
	dirs := append(filepath.SplitList(os.Getenv("PATH")), "/usr/lib/google-cloud-sdk/bin")
	for _, name := range []string{"kubectl", "kubectl.1.27", "kubectl.1.29", "kubectl.1.30", "kubectl.1.33"} {
		for _, dir := range dirs {
			path := filepath.Join(dir, name)
			if info, err := os.Stat(path); err == nil && info.Mode()&0o111 != 0 && found[name] == "" {
				found[name] = path
			}
		}
	}
	return found
}

// kubectl is one binary with one kubeconfig.
type kubectl struct {
	t      testing.TB
	binary string
	config string
	home   string
	bare   bool // the binary is kubectl itself, not a launcher that looks for others
}

func (k *kubectl) run(stdin string, args ...string) (string, error) {
	k.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, k.binary, args...)
	cmd.Env = []string{"KUBECONFIG=" + k.config, "HOME=" + k.home, "PATH=" + os.Getenv("PATH")}
	cmd.Stdin = strings.NewReader(stdin)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

// ok runs a command that must succeed.
func (k *kubectl) ok(stdin string, args ...string) string {
	k.t.Helper()
	out, err := k.run(stdin, args...)
	if err != nil {
		k.t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// fails runs a command that must fail.
func (k *kubectl) fails(stdin string, args ...string) string {
	k.t.Helper()
	out, err := k.run(stdin, args...)
	if err == nil {
		k.t.Fatalf("kubectl %s succeeded:\n%s", strings.Join(args, " "), out)
	}
	return out
}

// eachKubectl runs f with every stock kubectl of this machine.
func eachKubectl(t *testing.T, f func(t *testing.T, r *replica, k *kubectl)) {
	all := stockKubectls()
	if len(all) == 0 {
		t.Skip("no stock kubectl on this machine")
	}
	for name, binary := range all {
		t.Run(name, func(t *testing.T) {
			r := start(t, nil)
			f(t, r, &kubectl{t: t, binary: binary, config: r.kubeconfig("admin", "system:masters"), home: t.TempDir()})
		})
	}
}

func TestSmoke(t *testing.T) {
	eachKubectl(t, func(t *testing.T, r *replica, k *kubectl) {
		for _, args := range [][]string{
			{"get", "ns"}, {"api-resources"}, {"api-versions"}, {"version"}, {"get", "all", "-A"}, {"auth", "can-i", "--list"},
			{"create", "configmap", "x", "--from-literal=a=b"}, {"get", "cm", "-o", "yaml"},
			{"run", "hello", "--image=nginx"}, {"get", "pods", "-o", "wide"}, {"describe", "pod", "hello"}, {"get", "pod", "hello", "-o", "yaml"},
			{"explain", "pod.spec.containers"}, {"explain", "deployment"},
			{"create", "deployment", "d", "--image=nginx", "--replicas=3"}, {"scale", "deployment", "d", "--replicas=2"}, {"get", "deploy"},
			{"expose", "deployment", "d", "--port=80", "--type=NodePort"}, {"get", "svc", "-o", "wide"}, {"describe", "svc", "d"},
			{"label", "pod", "hello", "x=y"}, {"annotate", "pod", "hello", "x=y"}, {"patch", "deploy", "d", "-p", `{"spec":{"replicas":5}}`},
			{"delete", "pod", "hello"}, {"delete", "deploy", "d", "--cascade=background"}, {"create", "token", "default"},
			{"auth", "whoami"}, {"apply", "-f", "-"}, {"apply", "-f", "-"}, {"apply", "--server-side", "-f", "-"}, {"diff", "-f", "-"},
			{"replace", "-f", "-"}, {"get", "events"}, {"cluster-info"}, {"top", "nodes"}, {"get", "--raw", "/readyz?verbose"},
		} {
			out, err := k.run("apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: applied\n  namespace: default\ndata:\n  a: b\n", args...)
			if len(out) > 1500 {
				out = out[:1500] + "..."
			}
			t.Logf("$ kubectl %s (%v)\n%s", strings.Join(args, " "), err, out)
		}
	})
}
