//go:build guest

package inside

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	typed "k8s.io/client-go/kubernetes/typed/core/v1"

	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/internal/wait"
)

// encryptedLab is a cluster with workers that encrypt their traffic by WireGuard.
type encryptedLab struct {
	*testing.T
	ctx  context.Context
	lab  *lab.Lab
	pods typed.PodInterface
	node typed.NodeInterface
}

// runPod creates a pod on a worker and waits until it is in a phase.
func (e encryptedLab) runPod(name, node, script string, want v1.PodPhase) *v1.Pod {
	e.Helper()
	p := newPod(name, "", "", "sh", "-c", script)
	p.Spec.NodeName = node
	var last *v1.Pod
	var missing error // error of the last check
	err := wait.For(e.ctx, time.Second, func() error {
		got, err := e.pods.Get(e.ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			_, err = e.pods.Create(e.ctx, p, metav1.CreateOptions{})
			return errors.Join(err, fmt.Errorf("pod %s was made just now", name))
		}
		if err != nil {
			return err
		}
		last, missing = got, nil
		if got.Status.Phase != want || got.Status.PodIP == "" {
			missing = fmt.Errorf("pod %s is %s at %q: %+v", name, got.Status.Phase, got.Status.PodIP,
				got.Status.ContainerStatuses)
		}
		return missing
	})
	if err != nil {
		said, lerr := e.pods.GetLogs(name, &v1.PodLogOptions{}).DoRaw(context.Background())
		e.Fatalf("%v: %v; its output is %s (%v); the tunnels carried %d and %d bytes", err, missing, said, lerr,
			e.tunnelBytes("w1"), e.tunnelBytes("w2"))
	}
	e.Logf("pod %s is %s", name, want)
	return last
}

// awaitKey returns the public key that a worker publishes, when it is none of the keys in before.
func (e encryptedLab) awaitKey(node string, before ...string) (key string) {
	e.Helper()
	if err := wait.For(e.ctx, time.Second, func() error {
		n, err := e.node.Get(e.ctx, node, metav1.GetOptions{})
		if err != nil {
			return err
		}
		key = n.Annotations["keelson.dev/wireguard-key"]
		if raw, err := base64.StdEncoding.DecodeString(key); err != nil || len(raw) != 32 ||
			strings.Contains(strings.Join(before, " "), key) {
			return fmt.Errorf("the key of %s is %q (%v), before %v", node, key, err, before)
		}
		return nil
	}); err != nil {
		e.Fatal(err)
	}
	return key
}

// checkFetch fetches a page of a pod on another worker.
func (e encryptedLab) checkFetch(node, pod string) {
	e.Helper()
	h, err := e.lab.Host(node)
	if err != nil {
		e.Fatal(err)
	}
	c := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) { return h.Dial(ctx, address) }}}
	if err := wait.For(e.ctx, time.Second, func() error {
		resp, err := c.Get("http://" + pod + ":8080/page")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if n, err := io.Copy(io.Discard, resp.Body); n != 200000 {
			return fmt.Errorf("a page of %d bytes: %v", n, err)
		}
		return nil
	}); err != nil {
		e.Fatal(err)
	}
}

// tunnelBytes returns the number of bytes that a worker has sent through its encrypted tunnel.
func (e encryptedLab) tunnelBytes(node string) (bytes int64) {
	e.Helper()
	h, err := e.lab.Host(node)
	if err != nil {
		e.Fatal(err)
	}
	out, err := h.Command(context.Background(), "/bin/busybox", "cat", "/proc/net/dev").CombinedOutput()
	if err != nil {
		e.Fatalf("%v: %s", err, out)
	}
	for line := range strings.Lines(string(out)) {
		if name, rest, ok := strings.Cut(strings.TrimSpace(line), ":"); ok && name == "keelson-wg" {
			if f := strings.Fields(rest); len(f) > 8 {
				if _, err := fmt.Sscan(f[8], &bytes); err != nil {
					e.Fatal(err)
				}
				return bytes
			}
		}
	}
	e.Fatalf("%s has no encrypted tunnel: %s", node, out)
	return 0
}

// F108: agents with encryption exchange their keys through the control plane, and their pods are
// reached through the tunnel. A node with a removed key publishes another key while its agent runs,
// and again at its next start, and the other node uses it.
func TestEncryptedCluster(t *testing.T) {
	l := createLab(t, func(c *lab.Config) { c.Workers, c.PodNetwork = 2, "wireguard" })
	ctx, cancel := context.WithTimeout(t.Context(), 2*soon)
	defer cancel()
	core := newClient(t)
	e := encryptedLab{T: t, ctx: ctx, lab: l, pods: core.Pods("default"), node: core.Nodes()}
	k1, k2 := e.awaitKey("w1"), e.awaitKey("w2")
	if k1 == k2 {
		t.Errorf("both workers have the key %s", k1)
	}
	h, err := l.Host("w1")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(h.DataDir(), "wireguard.json")
	if st, err := os.Stat(file); err != nil || st.Mode().Perm() != 0o600 {
		t.Fatalf("the key's file: %v, %v", st, err)
	}
	server := e.runPod("server", "w1",
		"mkdir /www; head -c 200000 /dev/zero > /www/page; exec busybox httpd -f -p 8080 "+
			"-h /www", v1.PodRunning)
	e.checkFetch("w2", server.Status.PodIP)
	before := e.tunnelBytes("w1")
	if before < 200000 {
		t.Errorf("%d bytes went through the tunnel", before)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	k3 := e.awaitKey("w1", k1, k2) // while the agent runs
	e.checkFetch("w2", server.Status.PodIP)
	if after := e.tunnelBytes("w1"); after < before+200000 {
		t.Errorf("of %d bytes that went through the tunnel %d did with the new key", after, after-before)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := l.RestartDaemon(ctx, "w1"); err != nil {
		t.Fatal(err)
	}
	e.awaitKey("w1", k1, k2, k3)
	e.checkFetch("w2", server.Status.PodIP)
	for _, name := range []string{"w1", "w2"} {
		if err := wait.For(ctx, 250*time.Millisecond, func() error {
			n, err := e.node.Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			for _, c := range n.Status.Conditions {
				if c.Type == "keelson.dev/Degraded" && c.Status != v1.ConditionFalse {
					return fmt.Errorf("node %s: %s", name, c.Message)
				}
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	}
}
