package e2e

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/test/testenv"
)

// F38 F39 F44: invalid input is refused with the object, the field and the reason, and nothing is
// stored.
func TestRefusals(t *testing.T) {
	w := newNamespace(t)
	dir := t.TempDir()
	for name, c := range map[string]struct {
		yaml string
		want []string
	}{
		"unknown field": {"apiVersion: v1\nkind: Pod\nmetadata: {name: bad}\nspec: {containers: [{name: a, " +
			"image: b, imag: c}]}", []string{"unknown field", "imag"}},
		"wrong type": {"apiVersion: v1\nkind: Pod\nmetadata: {name: bad}\nspec: {containers: {name: a}}",
			[]string{"Pod", "containers"}},
		"no containers": {"apiVersion: v1\nkind: Pod\nmetadata: {name: bad}\nspec: {}",
			[]string{"bad", "spec.containers", "Required value"}},
		"bad name": {"apiVersion: v1\nkind: Pod\nmetadata: {name: Bad_Name}\nspec: {containers: [{name: a, " +
			"image: b}]}", []string{"metadata.name", "Bad_Name"}},
		"no image": {"apiVersion: v1\nkind: Pod\nmetadata: {name: bad}\nspec: {containers: [{name: a}]}",
			[]string{"spec.containers[0].image", "Required value"}},
		"bad port": {"apiVersion: v1\nkind: Service\nmetadata: {name: bad}\nspec: {ports: [{port: 70000}]}",
			[]string{"spec.ports[0].port", "70000"}},
		"bad quantity": {"apiVersion: v1\nkind: Pod\nmetadata: {name: bad}\nspec: {containers: [{name: a, " +
			"image: b, resources: {limits: {memory: lots}}}]}", []string{"lots"}},
		"selector and label": {"apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: bad}\nspec: {selector: " +
			"{matchLabels: {a: b}}, template: {metadata: {labels: {a: c}}, spec: {containers: [{name: a, image: b}]}}}",
			[]string{"spec.template.metadata.labels", "selector"}},
		"malformed YAML": {"apiVersion: v1\nkind: Pod\nmetadata: {name: bad", []string{"error"}},
		"unknown kind":   {"apiVersion: v1\nkind: Podd\nmetadata: {name: bad}", []string{"Podd"}},
		"node port range": {"apiVersion: v1\nkind: Service\nmetadata: {name: bad}\nspec: {type: NodePort, ports: " +
			"[{port: 80, nodePort: 99}]}", []string{"nodePort", "99"}},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(dir, strings.ReplaceAll(name, " ", "-")+".yaml")
			if err := os.WriteFile(file, []byte(c.yaml), 0o600); err != nil {
				t.Fatal(err)
			}
			out, err := testenv.Try(t, testenv.Lab().Config.BinDir+"/kctl", "-n", w.ns, "create", "-f", file)
			if err == nil {
				t.Fatalf("accepted: %s", out)
			}
			for _, part := range c.want {
				if !strings.Contains(out, part) {
					t.Errorf("%q is missing in: %s", part, out)
				}
			}
		})
	}
	for _, kind := range []string{"pods", "services", "deployments"} {
		if out := testenv.Kctl(t, "-n", w.ns, "get", kind, "-o", "name"); strings.TrimSpace(out) != "" {
			t.Errorf("stored after all: %s", out)
		}
	}
}

// F5 F20 F27: a bad token is 401, no identity too; plain HTTP is refused in clear words.
func TestStrangers(t *testing.T) {
	cfg := rest.AnonymousClientConfig(testenv.RestConfig(t))
	cfg.BearerToken = "not.a.token"
	cs, err := newClient(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cs.CoreV1().Pods("default").List(context.Background(),
		metav1.ListOptions{}); !apierrors.IsUnauthorized(err) {
		t.Errorf("a bad token: %v, want 401", err)
	}
	conn, err := net.DialTimeout("tcp", testenv.Lab().Config.Listen, soon)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(soon))
	fmt.Fprintf(conn, "GET /api HTTP/1.1\r\nHost: x\r\n\r\n")
	answer, _ := io.ReadAll(conn)
	if !strings.Contains(string(answer), "400") || !strings.Contains(strings.ToLower(string(answer)), "https") {
		t.Errorf("plain HTTP got %q, want a 400 that mentions HTTPS", answer)
	}
}

// A taken node port is named in the refusal; a ClusterIP too.
func TestTakenPort(t *testing.T) {
	w := newNamespace(t)
	a := webService("a", v1.ServiceTypeNodePort)
	a.Spec.Ports[0].NodePort = 31999
	first := w.createService(a)
	b := webService("b", v1.ServiceTypeNodePort)
	b.Spec.Ports[0].NodePort = 31999
	_, err := w.cs.CoreV1().Services(w.ns).Create(context.Background(), b, metav1.CreateOptions{})
	if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "spec.ports[0].nodePort") ||
		!strings.Contains(err.Error(), "already allocated") {
		t.Errorf("the same node port twice: %v", err)
	}
	c := webService("c", v1.ServiceTypeClusterIP)
	c.Spec.ClusterIP = first.Spec.ClusterIP
	_, err = w.cs.CoreV1().Services(w.ns).Create(context.Background(), c, metav1.CreateOptions{})
	if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "spec.clusterIP") {
		t.Errorf("the same cluster IP twice: %v", err)
	}
	// Deleting gives both back.
	if err := w.cs.CoreV1().Services(w.ns).Delete(context.Background(), "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.createService(b)
}
