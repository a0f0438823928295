package lab

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"keelson.dev/keelson/internal/wait"
)

// Dial opens a TCP connection from the network namespace of the host, within one second: callers
// retry. The address must be a numeric IP:PORT, so that only one socket is created, on the calling
// thread.
func (h Host) Dial(ctx context.Context, address string) (net.Conn, error) {
	return h.dialWithTimeout(ctx, time.Second, address)
}

// dialWithTimeout is Dial with the given timeout. Callers that do not retry need several seconds.
// If the first SYN is lost on a busy machine, the kernel retransmits it only after one second.
func (h Host) dialWithTimeout(ctx context.Context, timeout time.Duration, address string) (net.Conn, error) {
	var conn net.Conn
	err := inNetNS(h.NetNS(), func() (err error) {
		conn, err = (&net.Dialer{Timeout: timeout}).DialContext(ctx, "tcp", address)
		return err
	})
	return conn, err
}

// Listen listens for TCP connections in the network namespace of the host. The hosts of the lab can
// then connect to a server in this process.
func (h Host) Listen(address string) (net.Listener, error) {
	var l net.Listener
	err := inNetNS(h.NetNS(), func() (err error) {
		l, err = net.Listen("tcp", address)
		return err
	})
	return l, err
}

// dialLab opens a TCP connection from the network namespace of the bridges, which reaches all
// hosts.
func dialLab(ctx context.Context, address string) (net.Conn, error) {
	return bridgeHost.Dial(ctx, address)
}

func (h Host) apiAddress() string { return h.Endpoint(APIPort) }

// checkReady returns nil if the replica on the host h responds to GET /readyz with status 200. It
// does not verify the replica's certificate. The result only selects a replica to forward
// connections to, and clients verify TLS themselves.
func checkReady(ctx context.Context, h Host) error { return checkReadyWith(ctx, h, dialLab) }

func checkReadyWith(ctx context.Context, h Host, dial func(context.Context, string) (net.Conn, error)) error {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // see above
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			return dial(ctx, address)
		},
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+h.apiAddress()+"/readyz", nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(io.LimitReader(resp.Body, 2048))
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("/readyz: %s: %s", resp.Status, strings.TrimSpace(string(body)))
	}
	return nil
}

// readiness waits until the replicas and the nodes of a lab are ready.
type readiness struct{ lab *Lab }

// adminClient returns an API client with the kubeconfig at Config.Kubeconfig.
func (r readiness) adminClient() (*kubernetes.Clientset, error) {
	cfg, err := clientcmd.BuildConfigFromFlags("", r.lab.Config.Kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", r.lab.Config.Kubeconfig, err)
	}
	return kubernetes.NewForConfig(cfg)
}

// nodeSessions returns the resource version of each node's Lease by node name. The resource version
// changes only when an agent starts a session with the control plane.
func nodeSessions(ctx context.Context, cs kubernetes.Interface) (map[string]string, error) {
	leases, err := cs.CoordinationV1().Leases(v1.NamespaceNodeLease).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("listing the records of the nodes' sessions: %w", err)
	}
	out := map[string]string{}
	for _, lease := range leases.Items {
		out[lease.Name] = lease.ResourceVersion
	}
	return out, nil
}

// waitNodes waits until all workers are ready: the Node is Ready, and its agent has started a
// session that is not in previous. previous is an earlier result of nodeSessions. waitNodes returns
// an error if an agent exits. step prints progress.
func (r readiness) waitNodes(ctx context.Context, previous map[string]string, step func(string, ...any)) error {
	cs, err := r.adminClient()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	seen := map[string]bool{}
	return wait.For(ctx, 50*time.Millisecond, func() error {
		nodes, err := cs.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return fmt.Errorf("listing nodes: %w", err)
		}
		now, err := nodeSessions(ctx, cs)
		if err != nil {
			return err
		}
		for _, n := range nodes.Items {
			if !seen[n.Name] && now[n.Name] != previous[n.Name] && isNodeReady(&n) {
				seen[n.Name] = true
				step("worker %s is Ready", n.Name)
			}
		}
		var missing []error
		for _, h := range r.lab.hosts().hostsWithRole(RoleWorker) {
			if seen[h.Name] {
				continue
			}
			if h.daemonPID() == 0 {
				cancel()
				return fmt.Errorf("the agent of %s exited; the end of %s:\n%s", h.Name, h.LogFile(),
					lastLines(h.LogFile(), 15))
			}
			missing = append(missing, fmt.Errorf("worker %s is not Ready: see %s", h.Name, h.LogFile()))
		}
		return errors.Join(missing...)
	})
}

func isNodeReady(n *v1.Node) bool {
	for _, c := range n.Status.Conditions {
		if c.Type == v1.NodeReady {
			return c.Status == v1.ConditionTrue
		}
	}
	return false
}
