package attack

import (
	"context"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/test/testenv"
)

// clientAt returns a client of one replica with its own connections.
func clientAt(t *testing.T, replica string, conf *rest.Config) kubernetes.Interface {
	t.Helper()
	h := testenv.Host(t, replica)
	conf = rest.CopyConfig(conf)
	conf.Host = fmt.Sprintf("https://%s:%d", h.IP, lab.APIPort)
	conf.Dial = func(ctx context.Context, _, address string) (net.Conn, error) { return h.Dial(ctx, address) }
	cs, err := kubernetes.NewForConfig(conf)
	if err != nil {
		t.Fatal(err)
	}
	return cs
}

// A revoked node loses access within five seconds at every replica, for calls and for its session.
// It stays without access although its agent keeps trying. With a token for its name the node joins
// again, and its agent finds the token by itself.
func TestRevokedNode(t *testing.T) {
	const node, within = "w3", 5 * time.Second
	admin := guardCluster(t)
	ctx := context.Background()
	stolen := stolenNodeConfig(t, node)
	replicas := []string{"cp1", "cp2", "cp3"}
	var thieves []kubernetes.Interface
	for _, r := range replicas {
		cs := clientAt(t, r, stolen)
		if _, err := cs.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{}); err != nil {
			t.Fatalf("before it was revoked, at %s: %v", r, err)
		}
		thieves = append(thieves, cs)
	}
	epoch := func() string {
		l, err := admin.CoordinationV1().Leases("kube-node-lease").Get(ctx, node, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return l.Annotations["keelson.dev/session-epoch"]
	}
	before := epoch()
	testenv.Kctl(t, "cluster", "revoke", "node/"+node)
	testenv.EventuallyWithin(t, within, func() error {
		for i, cs := range thieves {
			if _, err := cs.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{}); !apierrors.IsUnauthorized(err) {
				return fmt.Errorf("%s responds to a revoked certificate with %v", replicas[i], err)
			}
		}
		return nil
	})
	testenv.Eventually(t, soon, func() error { return checkReadiness(ctx, admin, node, "Unknown") })
	if now := epoch(); now != before {
		t.Errorf("a revoked node has opened a session: epoch %s, then %s", before, now)
	}
	token := strings.TrimSpace(testenv.Kctl(t, "cluster", "token", "create", "--names", node, "--replace"))
	runOnHost(t, node, "umask 077 && echo "+token+" > /etc/keelson/.new && mv /etc/keelson/.new /etc/keelson/token")
	testenv.Eventually(t, soon, func() error { return checkReadiness(ctx, admin, node, "True") })
	testenv.Eventually(t, soon, func() error {
		if out := runOnHost(t, node, "ls /etc/keelson"); strings.Contains(string(out), "token") {
			return fmt.Errorf("the token lies on the node's disk: %s", out)
		}
		return nil
	})
	for i, cs := range thieves {
		if _, err := cs.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{}); !apierrors.IsUnauthorized(err) {
			t.Errorf("%s responds to the old certificate with %v after the node has a new one", replicas[i], err)
		}
	}
}

// checkReadiness returns an error unless the Ready condition of a node has the status want.
func checkReadiness(ctx context.Context, cs kubernetes.Interface, node, want string) error {
	n, err := cs.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
	if err != nil {
		return err
	}
	for _, c := range n.Status.Conditions {
		if c.Type == "Ready" && string(c.Status) == want {
			return nil
		}
	}
	return fmt.Errorf("node %s is not Ready=%s: %+v", node, want, n.Status.Conditions)
}
